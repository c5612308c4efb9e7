"""Qwen 2.5, Qwen 3 and the Hermes models: a JSON object in tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Small models of these families leave the tags out, with or without a code fence instead: see bare_json.
"""

from __future__ import annotations

from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import EndOfText, Steps
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls.call_object import read_call_object


class Hermes(ToolCallFormat):
    name = "hermes"
    start, end = "<tool_call>", "</tool_call>"
    openers = (start,)
    other_markers = (end,)
    trims = True

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        reader = parse.reader
        call = yield from read_call_object(reader)
        try:
            yield from reader.space()
            if (yield from reader.peek((self.start,))) != self.start:  # the next call closes this one too
                yield from reader.expect(self.end)
        except EndOfText:
            if reader.cut_short:
                raise
        parse.call(*call)
