"""Llama 4, Llama 3.2 and others: a Python list of calls with keyword arguments.

    [get_weather(city="Paris", days=3), get_time()]
    <|python_start|>[get_weather(city="Paris")]<|python_end|>

Without the markers it must stand at the beginning of a line, and name tools that are offered. The list is one thing:
none of its calls counts before its end.
"""

from __future__ import annotations

import re

from xllm_npu.text.argument_types import object_text
from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import MAX_NAME, Parse
from xllm_npu.text.output_reader import NotMarkup, Steps, TextReader
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls.python_literal import read_literal
from xllm_npu.text.tool_spec import ToolSpec

START, END, TAG = "<|python_start|>", "<|python_end|>", "<|python_tag|>"

_NAME = re.compile(r"[^\s()\[\]{},=\"'<>]*")


class Pythonic(ToolCallFormat):
    name = "pythonic"
    openers = (START, TAG)
    line_openers = ("[",)
    other_markers = (END,)
    section = ("[", "]")
    separator = ", "
    json_arguments = False

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        reader = parse.reader
        parse.is_certain = opener != "["
        if opener != "[":
            yield from reader.space()
            yield from reader.expect("[")
        calls: list[tuple[str, str]] = []
        while True:
            yield from reader.space()
            name = yield from reader.matching(_NAME, MAX_NAME)
            yield from reader.expect("(")
            if name not in parse.tools and opener == "[":
                raise NotMarkup
            parse.is_certain = True
            calls.append((name, (yield from _read_arguments(reader))))
            yield from reader.space()
            if (yield from reader.expect(",", "]")) == "]":
                break
        for call in calls:
            parse.call(*call)
        yield from reader.space()
        if opener != "[":
            yield from reader.accept_end(END)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(f"{tool.name}(", grammar.keyword_arguments(tool), ")")


def _read_arguments(reader: TextReader) -> Steps[str]:
    pairs: list[tuple[str, str]] = []
    yield from reader.space()
    while (yield from reader.accept(")")) is None:
        key = yield from reader.matching(_NAME, MAX_NAME)
        yield from reader.space()
        yield from reader.expect("=")
        yield from reader.space()
        value = yield from read_literal(reader)
        pairs.append((key, value))
        yield from reader.space()
        if (yield from reader.expect(",", ")")) == ")":
            break
        yield from reader.space()
    return object_text(pairs)
