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
    size = len(json.dumps(schema, ensure_ascii=False))
    _bound(size, MAX_SCHEMA_CHARS, "a schema takes at most {limit} characters of JSON, got {size}")
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
    return _serialized({"lark_grammar": f"start: {_regex_literal(pattern)}"})


def choice(options: Sequence[str]) -> str:
    """The output is one of `options`."""
    if not options:
        raise ValueError("must have at least one option")
    _bound(len(options), MAX_CHOICES, "takes at most {limit} options, got {size}")
    _bound(sum(map(len, options)), MAX_CHOICE_CHARS, "takes at most {limit} characters in all, got {size}")
    return _serialized({"lark_grammar": "start: " + " | ".join(map(literal, dict.fromkeys(options)))})


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


def structural_tag(tag: Mapping[str, Any]) -> str:
    """Free text with parts that have a form, in vLLM's first notation.

    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}, ...], "triggers": ["<f"]}: wherever the text comes
    to a trigger, what follows must be the rest of a `begin` that begins with it, JSON of the schema, and the `end`.
    """
    if "format" in tag:
        raise ValueError('takes "structures" and "triggers"; "format" is not supported')
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise ValueError('needs "structures" and "triggers", lists with at least one element')
    size = len(json.dumps(tag, ensure_ascii=False))
    _bound(size, MAX_SCHEMA_CHARS, "takes at most {limit} characters of JSON, got {size}")
    by_trigger: dict[str, list[str]] = {}
    for i, one in enumerate(structures):
        trigger, body = _structure(one, triggers, f"structures[{i}]")
        by_trigger.setdefault(trigger, []).append(body)
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(by_trigger)))})* TEXT", f"TEXT: {_ANY_TEXT}"]
    for i, (trigger, bodies) in enumerate(by_trigger.items()):
        rules.append(f"tag_{i}: until_{i} ({' | '.join(bodies)})")
        rules.append(f"until_{i}[lazy]: TEXT {literal(trigger)}")
    return _serialized({"lark_grammar": "\n".join(rules)})


def _structure(one: Any, triggers: Sequence[Any], where: str) -> tuple[str, str]:
    """(its trigger, Lark for what comes after that)"""
    if not isinstance(one, dict) or not isinstance(one.get("begin"), str) or not isinstance(one.get("end", ""), str):
        raise ValueError(f'has {where}, which must have the texts "begin" and "end"')
    trigger = next((t for t in triggers if isinstance(t, str) and t and one["begin"].startswith(t)), None)
    if trigger is None:
        raise ValueError(f"has {where}, whose begin starts with none of the triggers")
    schema = one.get("schema", True)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"has {where}, whose schema is no JSON schema")
    rest, end = one["begin"][len(trigger):], one.get("end", "")
    parts = [literal(rest) if rest else "", f"%json {json.dumps(with_whitespace(schema), ensure_ascii=False)}",
             literal(end) if end else ""]
    return trigger, " ".join(filter(None, parts))


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


def _regex_literal(pattern: str) -> str:
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


def _bound(size: int, limit: int, message: str) -> None:
    if size > limit:
        raise ValueError(message.format(limit=limit, size=size))


def _serialized(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
