"""Kimi K2: a section of calls whose ids name the tool, `functions.NAME:INDEX`.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>                                                   (without line breaks)
"""

from __future__ import annotations

from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Markers, Steps
from xllm_npu.text.tool_calls.call_object import read_arguments
from xllm_npu.text.tool_calls.call_section import CallsInSection
from xllm_npu.text.tool_spec import ToolSpec

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_AFTER_ID = Markers((ARGUMENTS,))


class KimiK2(CallsInSection):
    name = "kimi_k2"
    openers = (BEGIN, CALL)
    other_markers = (END, ARGUMENTS, CALL_END)
    trigger = BEGIN
    section = (BEGIN, END)

    def _read_call(self, parse: Parse) -> Steps[None]:
        reader = parse.reader
        id, _ = yield from reader.text_until(_AFTER_ID)
        arguments = yield from read_arguments(reader)
        yield from reader.space()
        yield from reader.expect(CALL_END)
        id = id.strip()
        name, colon, index = id.removeprefix("functions.").rpartition(":")
        parse.call(name if colon and index.isdecimal() else id.removeprefix("functions."), arguments, id)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(f"{CALL}functions.{tool.name}:", grammar.regex("0|[1-9][0-9]?"), ARGUMENTS,
                                grammar.arguments(tool), CALL_END)
