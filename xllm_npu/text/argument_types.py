"""Arguments that a model wrote as bare text, with the types that the tool's schema gives them.

Formats in the manner of XML write `<parameter=count>3</parameter>` for 3 and for "3" alike; only the schema tells them
apart. A string stays one unless the schema says otherwise; what does not fit the schema stays a string, for the
client to judge. References are followed within the schema only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from xllm_npu.text.json_scanner import dumped, strict_text

MAX_REFERENCES = 16

_NUMBER = re.compile(r"[-+]?[0-9]{1,400}(\.[0-9]{0,400})?([eE][-+]?[0-9]{1,3})?")
_INTEGER = re.compile(r"[-+]?[0-9]{1,400}(\.0{1,16})?")
_LITERALS = {"true": "boolean", "false": "boolean", "null": "null"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))


def arguments_object(pairs: Iterable[tuple[str, str]], schema: dict[str, Any]) -> str:
    """JSON text of an object of typed values; of a repeated key the last value counts."""
    known = properties_of(schema)
    return object_text((key, typed(text, known.get(key), schema)) for key, text in pairs)


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schemas of an object's values."""
    found = resolved(schema, schema).get("properties")
    return found if isinstance(found, dict) else {}


def object_text(pairs: Iterable[tuple[str, str]]) -> str:
    """JSON text of an object from keys and the JSON texts of their values."""
    return "{" + ", ".join(f"{dumped(key)}: {value}" for key, value in dict(pairs).items()) + "}"


def typed(text: str, schema: Any, root: dict[str, Any]) -> str:
    """The JSON text of a value of this schema that was written as `text`. Without a schema: JSON, else a string."""
    types = types_of(schema, root)
    if not types:
        return json_or_string(text)
    word = _PYTHON.get(text.strip(), text.strip())
    if "boolean" in types:
        word = word.lower() if word.lower() in ("true", "false") else word
    if _LITERALS.get(word) in types:
        return word
    if types & {"number", "integer"} and _NUMBER.fullmatch(word):
        if "number" in types or _INTEGER.fullmatch(word) or float(word).is_integer():
            return _number(word) or dumped(text)
    if types & {"object", "array"} and word[:1] in ("{", "["):
        found = strict_text(word)
        if found is not None and ("object" if found[0] == "{" else "array") in types:
            return found
    return dumped(text)


def json_or_string(text: str) -> str:
    found = strict_text(text)
    return dumped(text) if found is None or found[:1] == '"' else found


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    found: set[str] = set()
    todo, seen = [schema], set[int]()
    while todo:
        one = resolved(todo.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        own = _own_types(one)
        found |= own
        if not own:
            todo += [part for key in ("anyOf", "oneOf", "allOf") if isinstance(one.get(key), list) for part in one[key]]
    return found


def _own_types(schema: dict[str, Any]) -> set[str]:
    kind = schema.get("type")
    named = {t for t in (kind if isinstance(kind, list) else [kind]) if isinstance(t, str)} & _TYPES
    if named:
        return named
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    return {_type_of(value) for value in [*values, *([schema["const"]] if "const" in schema else [])]}


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema that a chain of references leads to; {} for what is no schema."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def _number(word: str) -> str | None:
    """`word` as a JSON number, with its digits as they are where JSON can hold them."""
    if strict_text(word) is not None:
        return word
    try:
        return json.dumps(float(word), allow_nan=False) if word.lstrip("+-")[:1] != "0" else None
    except ValueError:
        return None


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (int, float)):
        return "number"
    return "null" if value is None else "array" if isinstance(value, list) else "object"
