"""Calls in the manner of `<invoke name="..."><parameter name="...">`, with the tags of each family that writes so.

DeepSeek (DSML, its encoder is the specification):

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 has `tool_calls` instead, V4.1 `calls`, and a blank after each ｜DSML｜.

`string="false"` values are JSON. MiniMax M2 has `<minimax:tool_call>` outside, plain `<invoke>` and `<parameter>`
inside and no types, so the schema gives them.
"""

from __future__ import annotations

from typing import Any

from xllm_npu.text.argument_types import json_or_string, object_text, properties_of, typed
from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.json_scanner import dumped
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Ends, Markers, Steps
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls.call_section import read_section
from xllm_npu.text.tool_spec import ToolSpec

DSML = "｜DSML｜"

_QUOTE = Markers(('"',))
_IS_STRING, _NOT_STRING = ' string="true"', ' string="false"'


class InvokeMarkup(ToolCallFormat):
    """`prefix` is what all inner tags begin with, `section_tag` the outer one; `has_types`: string="..." is written."""

    trims = True
    separator = "\n"
    json_arguments = False

    def __init__(self, name: str, section_tag: str, prefix: str, outer_prefix: str, has_types: bool) -> None:
        self.name = name
        begin, end = f"<{outer_prefix}{section_tag}>", f"</{outer_prefix}{section_tag}>"
        self._end = end
        self._invoke, self._invoke_end = f'<{prefix}invoke name="', f"</{prefix}invoke>"
        self._parameter, self._parameter_end = f'<{prefix}parameter name="', f"</{prefix}parameter>"
        self._has_types = has_types
        self.openers = (begin,)
        self.trigger = begin
        self.other_markers = (end, DSML) if prefix else (end,)
        self.section = (f"{begin}\n", f"\n{end}")
        self._in_section = Markers((self._invoke, end))
        self._value_ends = Ends({self._parameter_end: ((self._parameter, self._invoke_end), False)})

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        return read_section(parse, self._in_section, self._end, self._read_call)

    def _read_call(self, parse: Parse) -> Steps[None]:
        reader = parse.reader
        name, _ = yield from reader.text_until(_QUOTE)
        tool = parse.tools.get(name)
        schema = tool.parameters if tool is not None else {}
        pairs: list[tuple[str, str]] = []
        yield from reader.space()
        if (yield from reader.expect(">", "/>")) == ">":
            yield from reader.space()
            while (yield from reader.expect(self._parameter, self._invoke_end)) == self._parameter:
                key, _ = yield from reader.text_until(_QUOTE)
                kind = yield from reader.accept(_IS_STRING, _NOT_STRING)
                yield from reader.space()
                yield from reader.expect(">")
                value, _ = yield from reader.value(self._value_ends)
                pairs.append((key, self._value(value, kind, key, schema)))
        parse.call(name, object_text(pairs))

    def _value(self, text: str, kind: str | None, key: str, schema: dict[str, Any]) -> str:
        if kind == _IS_STRING:
            return dumped(text)
        if kind == _NOT_STRING:
            return json_or_string(text)
        return typed(text, properties_of(schema).get(key), schema)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(f'{self._invoke}{tool.name}">\n', grammar.bare_arguments(tool, self._around),
                                self._invoke_end)

    def _around(self, key: str, kind: str) -> tuple[str, str]:
        attribute = "" if not self._has_types else _IS_STRING if kind == "string" else _NOT_STRING
        return f'{self._parameter}{key}"{attribute}>', f"{self._parameter_end}\n"


DEEPSEEK_V32 = InvokeMarkup("deepseek_v32", "function_calls", DSML, DSML, True)
DEEPSEEK_V4 = InvokeMarkup("deepseek_v4", "tool_calls", DSML, DSML, True)
DEEPSEEK_V41 = InvokeMarkup("deepseek_v41", "calls", DSML + " ", DSML + " ", True)
MINIMAX_M2 = InvokeMarkup("minimax_m2", "tool_call", "", "minimax:", False)
