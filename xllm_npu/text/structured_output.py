"""Grammars of structured output: JSON, a regular expression, a choice, Lark or GBNF, tags within free text.

Each function makes an llguidance grammar in its JSON form: {"grammars": [first, ...]}, where each is a
{"name", "lark_grammar"} or {"name", "json_schema"}, the first is where matching begins, and `@name` in Lark refers to
another (https://github.com/guidance-ai/llguidance, docs/syntax.md). Sizes are bounded here; whether a grammar can be
compiled, and in bearable time, is `GrammarCompiler`'s to find out. Knows no HTTP: a size that is out of bounds is a
ValueError, whose text completes "The field ...".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SCHEMA_CHARS = 256 << 10
MAX_REGEX_CHARS = 16 << 10
MAX_LARK_CHARS = 64 << 10
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 << 10  # of all together

# Between the parts of JSON. Bounded: a model that has nothing to say would write blanks until its tokens run out.
WHITESPACE = r"[ \n\r\t]{0,64}"
_ANY_TEXT = r"/(.|\n)*/"


def json_object() -> str:
    return json_schema({"type": "object"})


def json_schema(schema: dict[str, Any] | bool, whitespace: str = WHITESPACE) -> str:
    """`whitespace`: a regular expression for what may stand between the parts."""
    _bound_json(schema)
    return _serialized({"json_schema": with_whitespace(schema, whitespace)})


def with_whitespace(schema: dict[str, Any] | bool, whitespace: str = WHITESPACE) -> dict[str, Any] | bool:
    """The schema with the option set that llguidance reads from it, unless it brings its own."""
    if isinstance(schema, bool):
        return schema
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": whitespace, **(own if isinstance(own, dict) else {})}
    return {**schema, "x-guidance": options}


def regex(pattern: str) -> str:
    """The whole output matches `pattern`, in the syntax of the Rust crate `regex`; no look-around, no references."""
    return _serialized({"lark_grammar": f"start: {regex_literal(pattern)}"})


def choice(options: Sequence[str]) -> str:
    """The output is one of `options`."""
    if not options:
        raise ValueError("must have at least one option")
    _bound(len(options), MAX_CHOICES, "takes at most {limit} options, got {size}")
    _bound(sum(map(len, options)), MAX_CHOICE_CHARS, "takes at most {limit} characters in all, got {size}")
    words = [literal(option) for option in dict.fromkeys(options) if option]
    # One terminal: as alternatives of a rule each word is a state of the parser, of which it bears two thousand.
    rule = "start: CHOICE" + "?" * ("" in options) + "\nCHOICE: " + " | ".join(words) if words else 'start: ""'
    return _serialized({"lark_grammar": rule})


def lark(text: str) -> str:
    """`text` in llguidance's Lark; or in GBNF (`root ::= ...`), which is rewritten."""
    _bound(len(text), MAX_LARK_CHARS, "takes at most {limit} characters, got {size}")
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # whatever its parser makes of the text; the message is for whoever wrote that
            raise ValueError(f"is no grammar: {error}") from error
    return _serialized({"lark_grammar": text})


def structural_tag(tag: Mapping[str, Any], marker_ids: Mapping[str, int] | None = None) -> str:
    """Text with parts that have a form; see structural_tag.py. `marker_ids`: the tokenizer's."""
    from xllm_npu.text.structural_tag import lark_of  # which is made of the forms here

    _bound_json(tag)
    return _serialized(*lark_of(tag, marker_ids or {}))


def after_reasoning(grammar: str, end_marker: str, marker_ids: Mapping[str, int]) -> str:
    """Any text up to and with `end_marker`, and then, perhaps after blanks, what `grammar` matches.

    `marker_ids`: the tokenizer's, see `Tokenizer.marker_ids`.
    """
    parts = json.loads(grammar)["grammars"]
    first = {**parts[0], "name": parts[0].get("name") or "answer"}
    if end_marker in marker_ids:
        reasoning = f"start: TEXT {marker(marker_ids[end_marker])} BLANK @{first['name']}\nTEXT: {_ANY_TEXT}\n"
    else:
        reasoning = f"start: reasoning BLANK @{first['name']}\nreasoning[suffix={literal(end_marker)}]: {_ANY_TEXT}\n"
    return _serialized({"lark_grammar": reasoning + "BLANK: /[ \\n]{0,4}/\n"}, first, *parts[1:])


def literal(text: str) -> str:
    """`text` as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def marker(token_id: int) -> str:
    """A special token in Lark."""
    return f"<[{token_id}]>"


def marked(text: str, marker_ids: Mapping[str, int]) -> str:
    """`text` in Lark, as the token that it is, or as text."""
    return marker(marker_ids[text]) if text in marker_ids else literal(text)


def regex_literal(pattern: str) -> str:
    """`pattern` between the slashes of Lark, without anchors at its ends: it has to match everything anyway."""
    _bound(len(pattern), MAX_REGEX_CHARS, "takes at most {limit} characters, got {size}")
    if not pattern:
        return '""'
    out, escaped = [], False
    for c in pattern:
        out.append("\\/" if c == "/" and not escaped else _CONTROL.get(c, c))
        escaped = c == "\\" and not escaped
    if escaped:
        raise ValueError("ends in the middle of an escape")
    return f"/{''.join(out)}/"


_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _bound_json(value: Any) -> None:
    message = "takes at most {limit} characters of JSON, got {size}"
    if _outgrows(value, MAX_SCHEMA_CHARS):
        raise ValueError(f"takes at most {MAX_SCHEMA_CHARS} characters of JSON, and has more")
    _bound(len(json.dumps(value, ensure_ascii=False)), MAX_SCHEMA_CHARS, message)


def _outgrows(value: Any, limit: int) -> bool:
    """A look that ends soon, as megabytes may have been sent: whether it has more characters in any case."""
    size, open_values = 0, [value]
    while open_values and size <= limit:
        one = open_values.pop()
        size += 1 + (len(one) if isinstance(one, str | list | dict) else 0)
        if isinstance(one, list):
            open_values += one
        elif isinstance(one, dict) and size <= limit:
            size += sum(map(len, one))
            open_values += one.values()
    return size > limit


def _bound(size: int, limit: int, message: str) -> None:
    if size > limit:
        raise ValueError(message.format(limit=limit, size=size))


def _serialized(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
