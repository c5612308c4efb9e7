"""Calls as JSON objects, `{"name": ..., "arguments": {...}}`, which several formats wrap in markup of their own."""

from __future__ import annotations

import json
from collections.abc import Callable

from xllm_npu.text.json_scanner import JsonScanner, mended, strict_text
from xllm_npu.text.output_reader import NotMarkup, Steps, TextReader

ARGUMENTS = ("arguments", "parameters")  # OpenAI's key, and Llama's
KEYS = frozenset(("name", "type", "id", "function", *ARGUMENTS))


def read_call_object(reader: TextReader, accepts_name: Callable[[str], bool] | None = None, first: str = "") -> Steps[
        tuple[str, str, str | None]]:
    """Read one object: the name, the arguments' JSON text and the id of the call. `first` of it has been read.

    With `accepts_name` the object is let go as soon as it has another key than calls have, or such a name.
    Raises NotMarkup, EndOfText.
    """
    scanner = JsonScanner(None if accepts_name is None else KEYS, accepts_name)
    scanner.feed(first)
    yield from reader.json(scanner)
    return call_of(scanner, accepts_name)


def call_of(scanner: JsonScanner, accepts_name: Callable[[str], bool] | None = None) -> tuple[str, str, str | None]:
    """What a complete object says. Raises NotMarkup if it is no call."""
    text, spans = scanner.text, scanner.spans()
    parts = {key: text[start:end] for key, (start, end) in spans.items()}
    if "name" not in parts and parts.get("function", "").startswith("{"):  # OpenAI's own form, one level down
        inner = JsonScanner()
        inner.feed(parts["function"])
        return call_of(inner, accepts_name)
    name = _string(parts.get("name") or parts.get("function") or "")
    if name is None or (accepts_name is not None and not accepts_name(name)):
        raise NotMarkup
    key = next((k for k in ARGUMENTS if k in parts), None)
    arguments = arguments_text(parts[key]) if key else "{}"
    if arguments is None or (accepts_name is not None and key is None):
        raise NotMarkup
    return name, arguments, _string(parts.get("id", ""))


def arguments_text(text: str) -> str | None:
    """JSON text of an object; of what is no object, None. Null is the empty object, a string is read once more."""
    text = text.strip()
    if text == "null":
        return "{}"
    if text.startswith('"'):
        text = (_string(text) or "").strip()
    return strict_text(text) if text.startswith("{") else None


def read_arguments(reader: TextReader, first: str = "") -> Steps[str]:
    """Read an object that stands for itself. Raises NotMarkup if something else comes, EndOfText."""
    if not first:
        yield from reader.space()
        first = yield from reader.expect("{")
    scanner = JsonScanner()
    scanner.feed(first)
    yield from reader.json(scanner)
    return mended(scanner.text, scanner.strict)


def _string(text: str) -> str | None:
    return str(json.loads(text, strict=False)) if text.startswith('"') else None
