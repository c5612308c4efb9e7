"""MiniMax M1: JSON objects in one pair of tags, one a line.

    <tool_calls>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_calls>
"""

from __future__ import annotations

from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Steps
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls.call_object import read_call_object
from xllm_npu.text.tool_spec import ToolSpec

START, END = "<tool_calls>", "</tool_calls>"


class MiniMaxM1(ToolCallFormat):
    name = "minimax"
    openers = (START,)
    other_markers = (END,)
    trims = True
    trigger = START
    section = (START + "\n", "\n" + END)
    separator = "\n"

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        reader = parse.reader
        yield from reader.space()
        while (yield from reader.accept_end(END)) is None:
            call = yield from read_call_object(reader)
            parse.call(*call)
            yield from reader.space()

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.call_object(tool)
