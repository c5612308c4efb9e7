"""Llama 3.1 to 3.3, and Llama 4 where it is told so: a JSON object with "parameters", with `<|python_tag|>` or bare.

    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}

Without the tag it is what bare_json reads.
"""

from __future__ import annotations

from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Steps
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls import bare_json
from xllm_npu.text.tool_calls.call_object import read_call_object
from xllm_npu.text.tool_spec import ToolSpec

TAG = "<|python_tag|>"


class Llama3Json(ToolCallFormat):
    name = "llama3_json"
    openers = (TAG,)
    line_openers = bare_json.OPENERS
    trigger = TAG
    separator = "; "

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        if opener != TAG:
            yield from bare_json.read_bare(parse, opener)
            return
        reader = parse.reader
        while True:
            call = yield from read_call_object(reader)
            parse.call(*call)
            yield from reader.space()
            yield from reader.accept(";", ",")
            yield from reader.space()
            if (yield from reader.peek("{")) != "{":
                return

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.call_object(tool, "parameters")
