"""Gemma 4: a notation of its own, in which keys are bare and strings stand between `<|"|>`.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,near:{places:[<|"|>a<|"|>,<|"|>b<|"|>]}}<tool_call|>

Nothing is escaped: in a string only `<|"|>` is markup.
"""

from __future__ import annotations

from xllm_npu.text.argument_types import object_text
from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.json_scanner import MAX_DEPTH, MAX_KEY, dumped, strict_text
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Markers, NotMarkup, Steps, TextReader
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_spec import ToolSpec

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_AFTER_NAME = Markers(("{", END, "\n"))
_AFTER_KEY = Markers((":", "{", "}", "[", "]", QUOTE, END))
_AFTER_VALUE = Markers((",", "}", "]", "{", "[", QUOTE, END))
_QUOTE = Markers((QUOTE,))


class Gemma4(ToolCallFormat):
    name = "gemma4"
    openers = (START,)
    other_markers = (END, QUOTE)
    opener = trigger = START
    json_arguments = False

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        reader = parse.reader
        yield from reader.space()
        yield from reader.expect("call:")
        name, marker = yield from reader.text_until(_AFTER_NAME)
        if marker != "{":
            raise NotMarkup
        arguments = yield from _read_object(reader, 1)
        yield from reader.space()
        yield from reader.expect(END)
        parse.call(name.strip(), arguments)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(f"call:{tool.name}", grammar.quoted_arguments(tool, QUOTE), END)


def _read_object(reader: TextReader, depth: int) -> Steps[str]:
    """Read an object after its brace."""
    pairs: list[tuple[str, str]] = []
    yield from reader.space()
    if (yield from reader.accept("}")) is not None:
        return "{}"
    while True:
        key, marker = yield from reader.text_until(_AFTER_KEY)
        if marker == QUOTE and not key.strip():  # some quote keys as well
            key, _ = yield from reader.text_until(_QUOTE)
            yield from reader.space()
            marker = yield from reader.expect(":")
        if marker != ":" or len(key) > MAX_KEY:
            raise NotMarkup
        value, marker = yield from _read_value(reader, depth)
        pairs.append((key.strip(), value))
        if marker == "}":
            return object_text(pairs)
        if marker != ",":
            raise NotMarkup
        yield from reader.space()


def _read_list(reader: TextReader, depth: int) -> Steps[str]:
    values: list[str] = []
    yield from reader.space()
    if (yield from reader.accept("]")) is not None:
        return "[]"
    while True:
        value, marker = yield from _read_value(reader, depth)
        values.append(value)
        if marker == "]":
            return "[" + ", ".join(values) + "]"
        if marker != ",":
            raise NotMarkup


def _read_value(reader: TextReader, depth: int) -> Steps[tuple[str, str]]:
    """Read a value, and the comma or bracket after it."""
    if depth > MAX_DEPTH:
        raise NotMarkup
    yield from reader.space()
    opener = yield from reader.accept(QUOTE, "{", "[")
    if opener is None:
        word, marker = yield from reader.text_until(_AFTER_VALUE)
        value = strict_text(word)
        if value is None and not word.strip():
            raise NotMarkup
        return dumped(word.strip()) if value is None else value, marker
    if opener == QUOTE:
        text, _ = yield from reader.text_until(_QUOTE)
        value = dumped(text)
    elif opener == "{":
        value = yield from _read_object(reader, depth + 1)
    else:
        value = yield from _read_list(reader, depth + 1)
    yield from reader.space()
    return value, (yield from reader.expect(",", "}", "]"))
