"""Structural tags, a description of text with parts that have a form, as Lark.

The notation is XGrammar's (https://xgrammar.mlc.ai, "Structural Tag Usage"), which vLLM takes in `structural_tag`; its
first one ("structures" and "triggers") is a `triggered_tags` in other words. Formats that count or exclude tokens, that
write schemas as XML, and `dispatch` are refused by name. Free text ends where a tag's `end` or a trigger comes up;
where nothing tells its end, it has to come last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xllm_npu.text import structured_output as forms

MAX_REPEAT = 1000
NO_MARKERS: Mapping[str, int] = {}


def lark_of(tag: Mapping[str, Any], marker_ids: Mapping[str, int] = NO_MARKERS) -> list[dict[str, Any]]:
    """llguidance's grammars for `tag`, the first one to begin with. Raises ValueError.

    `marker_ids`: the tokenizer's; where a tag's text has one of these, that token is meant.
    """
    writer = _Writer(marker_ids)
    described = tag["format"] if "format" in tag else _first_notation(tag)
    start = writer.rule(described, "format", last=True)
    lark = "\n".join([f"start: {start}", *writer.rules, "TEXT: /(.|\\n)*/"])
    return [{"lark_grammar": lark}, *writer.others]


def _first_notation(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise ValueError('needs "format", or "structures" and "triggers", lists with at least one element')
    tags = []
    for i, one in enumerate(structures):
        if not isinstance(one, dict):
            raise ValueError(f"has structures[{i}], which is no object")
        schema = {"type": "json_schema", "json_schema": one.get("schema", True)}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": schema, "end": one.get("end", "")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Writer:
    """Makes a rule for each format, and says what stands for it in another."""

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.others: list[dict[str, Any]] = []  # grammars that the rules refer to
        self._ids = marker_ids
        texts = sorted(marker_ids, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._kinds: dict[str, Callable[[Any, str, bool], str]] = {
            "const_string": self._const_string, "json_schema": self._json_schema, "regex": self._regex,
            "grammar": self._grammar, "any_text": self._any_text, "sequence": self._sequence, "or": self._or,
            "optional": self._repeated, "plus": self._repeated, "star": self._repeated, "repeat": self._repeated,
            "tag": self._tag, "triggered_tags": self._triggered_tags, "tags_with_separator": self._tags_with_separator,
        }  # fmt: skip

    def rule(self, format: Any, where: str, last: bool) -> str:
        """`last`: nothing follows, so that it may be free text."""
        kind = format.get("type") if isinstance(format, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f'has {where}, which must be an object with a "type"')
        if kind not in self._kinds:
            raise ValueError(f"has {where} of type {kind[:40]!r}, which is not supported; there are "
                             f"{', '.join(self._kinds)}")
        return self._kinds[kind](format, where, last)

    def _named(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _spelled(self, text: str) -> str:
        """Text in Lark, with the tokens that are in it; may be empty."""
        if self._markers is None:
            return _literal(text)
        parts, at = [], 0
        for found in self._markers.finditer(text):
            parts += [_literal(text[at:found.start()]), forms.marker(self._ids[found[0]])]
            at = found.end()
        return " ".join(filter(None, [*parts, _literal(text[at:])]))

    def _until(self, texts: Sequence[str]) -> str:
        """Free text up to and with the first of `texts` that comes up."""
        marked = [t for t in texts if self._markers is not None and self._markers.search(t)]
        plain = [forms.literal(t) for t in texts if t not in marked]
        choices = [f"TEXT {self._spelled(t)}" for t in marked]
        if plain:
            choices.append(self._named(f"TEXT ({' | '.join(plain)})", "[lazy]"))
        return self._named(" | ".join(choices))

    def _const_string(self, format: Any, where: str, last: bool) -> str:
        return self._named(self._spelled(_text(format, "value", where)) or '""')

    def _json_schema(self, format: Any, where: str, last: bool) -> str:
        _only(format, where, style="json", any_order=False)
        schema = format.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise ValueError(f"has {where}, whose json_schema is no JSON schema")
        return self._named(f"%json {json.dumps(forms.with_whitespace(schema), ensure_ascii=False)}")

    def _regex(self, format: Any, where: str, last: bool) -> str:
        return self._named(forms.regex_literal(_text(format, "pattern", where)))

    def _grammar(self, format: Any, where: str, last: bool) -> str:
        [made] = json.loads(forms.lark(_text(format, "grammar", where)))["grammars"]
        name = f"g{len(self.others)}"
        self.others.append({"name": name, **made})
        return self._named(f"@{name}")

    def _any_text(self, format: Any, where: str, last: bool) -> str:
        _only(format, where, excludes=[], max_tokens=None, max_chars=None)
        if not last:
            raise ValueError(f"has {where}, free text whose end nothing tells: put it into a tag, or last")
        return "TEXT"

    def _sequence(self, format: Any, where: str, last: bool) -> str:
        elements = _list(format, "elements", where)
        return self._named(" ".join(self.rule(one, f"{where}.elements[{i}]", last and i == len(elements) - 1)
                                    for i, one in enumerate(elements)))

    def _or(self, format: Any, where: str, last: bool) -> str:
        return self._named(" | ".join(self.rule(one, f"{where}.elements[{i}]", last)
                                      for i, one in enumerate(_list(format, "elements", where))))

    def _repeated(self, format: Any, where: str, last: bool) -> str:
        kind = format["type"]
        content = self.rule(format.get("content"), f"{where}.content", last and kind == "optional")
        if kind != "repeat":
            return self._named(content + {"optional": "?", "plus": "+", "star": "*"}[kind])
        low, high = format.get("min"), format.get("max")
        if not (type(low) is int and type(high) is int and 0 <= low <= MAX_REPEAT
                and (high == -1 or low <= high <= MAX_REPEAT)):
            raise ValueError(f"has {where}, whose min and max must be in [0, {MAX_REPEAT}], or max -1")
        return self._named(f"{content}{{{low},{'' if high == -1 else high}}}")

    def _tag(self, format: Any, where: str, last: bool) -> str:
        begin = self._spelled(_text(format, "begin", where))
        return self._named(f"{begin} {self._rest(format, where, last)}")

    def _rest(self, tag: Any, where: str, last: bool) -> str:
        """A tag's content and end."""
        ends = tag.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise ValueError(f"has {where}, whose end must be a text or a list of texts")
        content = tag.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            self._any_text(content, f"{where}.content", last=True)
            return self._until(ends)
        body = self.rule(content, f"{where}.content", last and ends == [""])
        return f"{body} ({' | '.join(self._spelled(end) or chr(34) * 2 for end in ends)})"

    def _triggered_tags(self, format: Any, where: str, last: bool) -> str:
        _only(format, where, excludes=[])
        at_least_one, once = bool(format.get("at_least_one")), bool(format.get("stop_after_first"))
        if not last and not (at_least_one and once):
            raise ValueError(f"has {where}, which has free text whose end nothing tells: put it last")
        triggers = _list(format, "triggers", where)
        by_trigger: dict[str, list[str]] = {}
        whole = []
        for i, tag in enumerate(_list(format, "tags", where)):
            name = f"{where}.tags[{i}]"
            begin = _text(tag, "begin", name)
            trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"has {name}, whose begin starts with none of the triggers")
            rest = self._named(self._rest(tag, name, last=False))
            whole.append(f"{self._spelled(begin)} {rest}")
            by_trigger.setdefault(trigger, []).append(f"{self._spelled(begin[len(trigger):])} {rest}")
        first = self._named(" | ".join(whole))
        if at_least_one and once:
            return first
        dispatched = self._named(" | ".join(f"{self._until([t])} ({' | '.join(bodies)})"
                                            for t, bodies in by_trigger.items()))
        if once:
            return self._named(f"TEXT | {dispatched}")
        return self._named(f"{first} {dispatched}* TEXT" if at_least_one else f"{dispatched}* TEXT")

    def _tags_with_separator(self, format: Any, where: str, last: bool) -> str:
        tags = self._named(" | ".join(self.rule(tag, f"{where}.tags[{i}]", last=False)
                                      for i, tag in enumerate(_list(format, "tags", where))))
        separator = self._spelled(_text(format, "separator", where))
        more = "" if format.get("stop_after_first") else f" ({separator} {tags})*"
        return self._named(f"{tags}{more}" if format.get("at_least_one") else f"({tags}{more})?")


def _literal(text: str) -> str:
    return forms.literal(text) if text else ""


def _text(format: Any, name: str, where: str) -> str:
    value = format.get(name) if isinstance(format, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"has {where}, whose {name} must be a text")
    return value


def _list(format: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"has {where}, whose {name} must be a list with at least one element")
    return value


def _only(format: Mapping[str, Any], where: str, **neutral: Any) -> None:
    """Raise for fields that are not supported, unless they ask for nothing."""
    for name, value in neutral.items():
        if format.get(name) not in (None, value):
            raise ValueError(f"has {where}.{name}, which is not supported")
