"""Python literals as they come, as JSON text: strings, numbers, True, False, None, lists, tuples and dicts.

Nothing is evaluated. JSON's own words and strings are understood too.
"""

from __future__ import annotations

import re

from xllm_npu.text.argument_types import object_text
from xllm_npu.text.json_scanner import MAX_DEPTH, MAX_WORD, dumped, strict_text
from xllm_npu.text.output_reader import NotMarkup, Steps, TextReader

_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_STRING = 1 << 24


def read_literal(reader: TextReader, depth: int = 0) -> Steps[str]:
    """Read one literal: its JSON text. Raises NotMarkup, EndOfText."""
    if depth > MAX_DEPTH:
        raise NotMarkup
    opener = yield from reader.accept("'", '"', "[", "(", "{")
    if opener is None:
        word = yield from reader.matching(_WORD, MAX_WORD)
        known = _WORDS.get(word) or (strict_text(word) if word[:1] in "-0123456789" else None)
        if not word and reader.ended:
            yield from reader.more()
        if known is None:
            raise NotMarkup
        return known
    if opener in _PLAIN:
        text = yield from read_string(reader, opener)
        return dumped(text)
    if opener == "{":
        return (yield from _read_dict(reader, depth))
    return (yield from _read_list(reader, "]" if opener == "[" else ")", depth))


def read_string(reader: TextReader, quote: str) -> Steps[str]:
    """Read a string whose opening quote has been read."""
    parts: list[str] = []
    while True:
        parts.append((yield from reader.matching(_PLAIN[quote], MAX_STRING)))
        if (yield from reader.chars(1)) == quote:
            return _joined(parts)
        parts.append((yield from _read_escape(reader)))


def _joined(parts: list[str]) -> str:
    """Two escapes may be the halves of one character."""
    text = "".join(parts)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") if not text.isascii() else text


def _read_escape(reader: TextReader) -> Steps[str]:
    c = yield from reader.chars(1)
    if c in _HEX_DIGITS:
        digits = yield from reader.chars(_HEX_DIGITS[c])
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise NotMarkup from None
    return _ESCAPES.get(c, c if c in "\\'\"" else "\\" + c)


def _read_list(reader: TextReader, end: str, depth: int) -> Steps[str]:
    values: list[str] = []
    yield from reader.space()
    while (yield from reader.accept(end)) is None:
        values.append((yield from read_literal(reader, depth + 1)))
        yield from reader.space()
        if (yield from reader.expect(",", end)) == end:
            break
        yield from reader.space()
    return "[" + ", ".join(values) + "]"


def _read_dict(reader: TextReader, depth: int) -> Steps[str]:
    pairs: list[tuple[str, str]] = []
    yield from reader.space()
    while (yield from reader.accept("}")) is None:
        quote = yield from reader.expect("'", '"')
        key = yield from read_string(reader, quote)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        value = yield from read_literal(reader, depth + 1)
        pairs.append((key, value))
        yield from reader.space()
        if (yield from reader.expect(",", "}")) == "}":
            break
        yield from reader.space()
    return object_text(pairs)
