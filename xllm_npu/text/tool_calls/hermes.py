"""Qwen 2.5, Qwen 3 and the Hermes models: a JSON object in tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Small models of these families often leave the tags out, or write a code fence instead: see bare_json. SmolLM2 was
taught to put a list of objects into the tags.
"""

from __future__ import annotations

from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import EndOfText, Steps
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls import bare_json
from xllm_npu.text.tool_calls.call_object import read_call_object
from xllm_npu.text.tool_spec import ToolSpec

START, END = "<tool_call>", "</tool_call>"


class Hermes(ToolCallFormat):
    name = "hermes"
    openers = (START,)
    line_openers = bare_json.OPENERS
    other_markers = (END,)
    trims = True
    opener = trigger = START
    separator = "\n"

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        if opener != START:
            yield from bare_json.read_bare(parse, opener)
            return
        reader = parse.reader
        yield from reader.space()
        calls = []
        if (yield from reader.accept("[")) is None:
            calls.append((yield from read_call_object(reader)))
        else:
            while not calls or (yield from reader.expect(",", "]")) == ",":
                calls.append((yield from read_call_object(reader)))
                yield from reader.space()
        try:
            yield from reader.space()
            if (yield from reader.peek(self.openers)) != START:  # the next call closes this one too
                yield from reader.expect(END)
        except EndOfText:
            if reader.cut_short:
                raise
        for call in calls:
            parse.call(*call)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence("\n", grammar.call_object(tool), "\n" + END)


class Json(Hermes):
    """For models that nothing is known of: the same is read, and bare objects are what forced calls are."""

    name = "json"
    opener = trigger = ""

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.call_object(tool)
