"""Grammars of forced calls: the Lark text, in llguidance's dialect, that a format's calls are put together in.

Markers that are tokens of the vocabulary are named by their ids, as to llguidance these tokens are no text. JSON is
left to llguidance; bare values have what this module can say of them: the values of `enum` and `const`, the bounds of
a string's length, and the parameters in the schema's order, of which only required ones must be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from xllm_npu.text.argument_types import properties_of, resolved, types_of
from xllm_npu.text.json_scanner import dumped
from xllm_npu.text.tool_spec import ToolSpec

MAX_STRING_BOUND = 1000  # characters; automata grow with it
_TEXT = "/(?s:.*)/"
# How JSON is spaced: as models were taught, and with no room for white space without end.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Expression(str):
    """A piece of Lark, where a plain string is text."""

    __slots__ = ()


class CallGrammar:
    """Collects rules; `text` is the grammar once there is a rule `start`."""

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        """See `Tokenizer.marker_ids`."""
        self._ids = marker_ids
        longest_first = sorted(marker_ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._rules: list[str] = []
        self._count = 0
        self._strict = False  # the tool whose arguments are being written
        self._quoted: dict[int, Expression] = {}

    @property
    def text(self) -> str:
        return "\n".join(self._rules) + "\n"

    def start(self, expression: Expression) -> None:
        self._rules.insert(0, f"start: {expression}")

    # Pieces

    def pieces(self, text: str) -> list[str]:
        """`text` in marker tokens and what is between them."""
        return [part for part in (self._split.split(text) if self._split else [text]) if part]

    def is_marker(self, text: str) -> bool:
        """Whether it is a token of its own, which to llguidance is no text."""
        return text in self._ids

    def literal(self, text: str) -> Expression:
        return Expression(" ".join(f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part)
                                   for part in self.pieces(text)) or '""')

    def any_marker_but(self, markers: Collection[str]) -> Expression | None:
        """One marker token; None if there are no others."""
        ids = sorted({i for text, i in self._ids.items() if text not in markers})
        return Expression(f"<[{','.join(_ranges(ids))}]>") if ids else None

    def sequence(self, *parts: str) -> Expression:
        """One after the other; plain strings are text."""
        return Expression(" ".join(p if isinstance(p, Expression) else self.literal(p) for p in parts if p))

    def one_of(self, parts: Sequence[str]) -> Expression:
        return self.rule(Expression(" | ".join(self.sequence(p) for p in parts)))

    def rule(self, expression: Expression, options: str = "", terminal: bool = False) -> Expression:
        self._count += 1
        name = Expression(f"{'T' if terminal else 'r'}{self._count}")
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def optional(self, expression: Expression) -> Expression:
        return Expression(f"({expression})?")

    def terminal(self, text: str) -> Expression:
        """Text within a terminal, where tokens cannot be."""
        return Expression(_quoted(text))

    def terminal_but(self, pattern: str, barred: Sequence[str] = ()) -> Expression:
        """What matches the terminal `pattern` and none of `barred`."""
        whole = self.rule(Expression(pattern), terminal=True)
        if not barred:
            return whole
        names = [self.rule(Expression(one), terminal=True) for one in barred]
        return self.rule(Expression(" & ".join([whole, *(f"~{name}" for name in names)])), terminal=True)

    def text_up_to(self, after: str, pattern: str = _TEXT, most: int | None = None) -> Expression:
        """Any text, and `after`, which is not in it. `most`: tokens of the text, if there is a limit."""
        if most is not None:
            return self._text_within(after, pattern, most)
        before, *rest = self._split.split(after, 1) if self._split else [after]
        if not rest:
            return self.rule(Expression(pattern), f"[suffix={_quoted(after)}]")
        # The token ends the text, and with it what comes before the token.
        text = self.rule(Expression(f"{pattern} {_quoted(before)}" if before else pattern), terminal=True)
        return self.sequence(text, *rest)

    def _text_within(self, after: str, pattern: str, most: int) -> Expression:
        """When the tokens are used up only `after` can come."""
        if most == 0:
            return self.literal(after)
        cut = self.sequence(self.rule(Expression(pattern), f"[max_tokens={most}]"), after)
        if self.is_marker(self.pieces(after)[0]):
            return cut
        whole = self.rule(Expression(pattern), f"[suffix={_quoted(after)}, max_tokens={most}]")
        return self.rule(Expression(f"{cut} | {whole}"))  # the first one counts as the one that was cut

    def regex(self, pattern: str) -> Expression:
        return self.rule(Expression(f"/{pattern}/"))

    def json(self, schema: Mapping[str, Any]) -> Expression:
        """JSON of this schema; what llguidance cannot enforce of it is an error for a strict tool, else let go."""
        options = {**_JSON_STYLE, "lenient": not self._strict}
        return self.rule(Expression("%json " + dumped({**schema, "x-guidance": options})))

    # Arguments

    def arguments(self, tool: ToolSpec) -> Expression:
        """The arguments as JSON. An object that names its keys and does not say otherwise has no others."""
        self._strict = tool.strict
        schema = dict(tool.parameters)
        if "$ref" not in schema:
            schema["type"] = "object"
        if schema.get("properties") == {} or (schema.get("properties") and not _is_open(schema)):
            schema.setdefault("additionalProperties", False)
        return self.json(schema)

    def call_object(self, tool: ToolSpec, key: str = "arguments") -> Expression:
        return self.sequence(f'{{"name": {dumped(tool.name)}, "{key}": ', self.arguments(tool), "}")

    def bare_arguments(self, tool: ToolSpec, around: Callable[[str, str], tuple[str, str]]) -> Expression:
        """Bare values one after the other; `around` has what stands before and after one, by its key and JSON type."""
        self._strict = tool.strict
        parts = []
        for key, schema in properties_of(tool.parameters).items():
            kind = _kind(schema, tool.parameters)
            before, after = around(key, kind)
            value = self._bare(schema, tool.parameters, after) if kind == "string" else self.sequence(
                self._json_value(schema, tool.parameters), after)
            whole = self.sequence(before, value)
            parts.append(whole if key in _required(tool.parameters) else self.optional(whole))
        return self.sequence(*parts)

    def keyword_arguments(self, tool: ToolSpec) -> Expression:
        """`key=value, ...` with values as JSON."""
        self._strict = tool.strict
        required = _required(tool.parameters)
        return self.listed([(self.sequence(f"{key}=", self._json_value(schema, tool.parameters)), key in required)
                            for key, schema in properties_of(tool.parameters).items()], ", ")

    def quoted_arguments(self, tool: ToolSpec, quote: str) -> Expression:
        """An object with bare keys and strings between `quote`."""
        self._strict = tool.strict
        return self._quoted_object(tool.parameters, tool.parameters, quote)

    def listed(self, items: Sequence[tuple[Expression, bool]], separator: str) -> Expression:
        """Items in their order with a separator between any two; an item may lack if it is not required."""
        rest = first = Expression('""')
        for item, required in reversed(items):
            new_first = self.sequence(item, rest)
            new_rest = self.sequence(separator, item, rest)
            first = self.rule(new_first if required else Expression(f"{new_first} | {first}"))
            rest = self.rule(new_rest if required else Expression(f"{new_rest} | {rest}"))
        return first

    # Values

    def _json_value(self, schema: Any, root: dict[str, Any]) -> Expression:
        schema = schema if isinstance(schema, dict) else {}
        refers = '"$ref"' in dumped(schema)
        definitions: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if refers and key in root}
        return self.json({**definitions, **schema})

    def _bare(self, schema: Any, root: dict[str, Any], after: str) -> Expression:
        """A string without quotes, and the text that ends it."""
        schema = resolved(schema, root)
        values = schema.get("enum") if isinstance(schema.get("enum"), list) else [schema.get("const")]
        texts = [value for value in values or () if isinstance(value, str)]
        if texts:
            return self.sequence(self.one_of([text or Expression('""') for text in texts]), after)
        return self.text_up_to(after, _bounded(schema))

    def _quoted_value(self, schema: Any, root: dict[str, Any], quote: str) -> Expression:
        schema = resolved(schema, root)
        known = self._quoted.get(id(schema))
        if known is not None:
            return known
        self._count += 1
        name = self._quoted[id(schema)] = Expression(f"r{self._count}")  # a schema may contain itself
        if _kind(schema, root) == "string":
            value = self.sequence(quote, self._bare(schema, root, quote))
        elif "object" in types_of(schema, root):
            value = self._quoted_object(schema, root, quote)
        elif "array" in types_of(schema, root):
            item = self._quoted_value(schema.get("items", {}), root, quote)
            empty = " | " + self.literal("[]") if not schema.get("minItems") else ""
            value = Expression(f'"[" {item} ("," {item})* "]"{empty}')
        else:
            value = self._json_value(schema, root)
        self._rules.append(f"{name}: {value}")
        return name

    def _quoted_object(self, schema: dict[str, Any], root: dict[str, Any], quote: str) -> Expression:
        required = _required(schema)
        return self.sequence("{", self.listed([
            (self.sequence(f"{key}:", self._quoted_value(one, root, quote)), key in required)
            for key, one in properties_of(schema).items()], ","), "}")


def _ranges(ids: Sequence[int]) -> list[str]:
    """Ascending ids, those that follow one another as `first-last`."""
    found: list[list[int]] = []
    for i in ids:
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return [f"{first}-{last}" if last > first else str(first) for first, last in found]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _required(schema: dict[str, Any]) -> frozenset[str]:
    required = resolved(schema, schema).get("required")
    return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()


def _is_open(schema: dict[str, Any]) -> bool:
    """Whether other keywords than `properties` say which keys there are."""
    return any(key in schema for key in ("patternProperties", "allOf", "anyOf", "oneOf", "unevaluatedProperties"))


def _kind(schema: Any, root: dict[str, Any]) -> str:
    """The JSON type that a value is written as: a string where it may be one, and where nothing says what it is."""
    types = types_of(schema, root)
    if not types or "string" in types:
        return "string"
    if "integer" in types:
        return "number"
    return next(t for t in ("object", "array", "number", "boolean", "null") if t in types)


def _bounded(schema: dict[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    least = least if isinstance(least, int) and 0 <= least <= MAX_STRING_BOUND else 0
    if not isinstance(most, int) or not least <= most <= MAX_STRING_BOUND:
        return f"/(?s:.{{{least},}})/" if least else _TEXT
    return f"/(?s:.{{{least},{most}}})/"
