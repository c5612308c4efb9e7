"""Finds the end of a JSON value in a text that arrives in pieces, and checks its syntax on the way.

The grammar is RFC 8259's, with two concessions to what models write: strings may hold raw control characters, and a
key may come twice. `JsonScanner.value_text` mends both, so that what leaves here is always strict JSON. Nesting and
the length of bare words are bounded, so that no document can exhaust Python's parser. Each character is looked at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

MAX_DEPTH = 64
MAX_WORD = 512  # characters of a number
MAX_KEY = 1024  # characters of a key or name that is compared with anything

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CONTROL = re.compile(r"[\x00-\x1f]")
_WORDS = frozenset(("true", "false", "null"))
_HEX = frozenset("0123456789abcdefABCDEF")

_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _AFTER = range(6)


class JsonScanner:
    """One value; white space before it is skipped. `feed` until `done` or `failed`.

    `keys`, if given, are the only ones that the outermost object may have, and `accepts_name` is asked about a string
    under its key "name": a text that is not what is looked for is let go at once.
    """

    __slots__ = ("_accepts_name", "_escape", "_from", "_in_string", "_in_word", "_key", "_keys", "_parts", "_size",
                 "_spans", "_stack", "_state", "_string", "_word", "done", "failed", "strict")

    def __init__(self, keys: Collection[str] | None = None, accepts_name: Callable[[str], bool] | None = None) -> None:
        self.done = self.failed = False
        self.strict = True  # no raw control character so far
        self._keys = keys
        self._accepts_name = accepts_name
        self._state = _VALUE
        self._stack: list[str] = []
        self._parts: list[str] = []
        self._size = 0  # characters in _parts
        self._in_string = False
        self._escape = 0  # 1: after a backslash; 2 to 5: hexadecimal digits are due
        self._string: list[str] | None = None  # the string's text, where it is looked at
        self._in_word = False
        self._word = ""
        self._key: str | None = None  # of the outermost object, whose value comes
        self._from = 0
        self._spans: dict[str, tuple[int, int]] = {}

    def feed(self, text: str) -> int:
        """Scan `text`; returns how many characters of it belong to the value."""
        at, end = 0, len(text)
        while at < end and not self.done and not self.failed:
            if self._in_string:
                at = self._string_part(text, at)
            elif self._in_word:
                at = self._word_part(text, at)
            else:
                at = self._structure(text, at)
        self._parts.append(text[:at])
        self._size += at
        return at

    def end(self) -> None:
        """The text has ended: a number that could have gone on is complete."""
        if self._in_word and not self.done:
            self._end_word(self._size)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def spans(self) -> dict[str, tuple[int, int]]:
        """Where in `text` the values of the outermost object lie, by key."""
        return self._spans

    # Strings

    def _string_part(self, text: str, at: int) -> int:
        if self._escape:
            return self._escaped(text, at)
        found = _PLAIN.match(text, at)
        assert found is not None
        stop = found.end()
        if self.strict and _CONTROL.search(text, at, stop):
            self.strict = False
        if stop < len(text):
            stop += 1
            if text[stop - 1] == "\\":
                self._escape = 1
            else:
                self._in_string = False
        if self._string is not None:
            self._string.append(text[at:stop])
        if not self._in_string:
            self._end_string(self._size + stop)
        return stop

    def _escaped(self, text: str, at: int) -> int:
        c = text[at]
        if self._escape == 1:
            self.failed = c not in '"\\/bfnrtu'
            self._escape = 2 if c == "u" else 0
        else:
            self.failed = c not in _HEX
            self._escape = (self._escape + 1) % 6
        if self._string is not None:
            self._string.append(c)
        return at + (not self.failed)

    def _begin_string(self) -> None:
        self._in_string = True
        key = self._state in (_KEY, _KEY_OR_END)
        looked_at = len(self._stack) == 1 and self._stack[0] == "{" and (key or self._key == "name")
        self._string = ['"'] if looked_at else None

    def _end_string(self, end: int) -> None:
        value = None
        if self._string is not None:
            quoted = "".join(self._string)
            value = json.loads(quoted, strict=False) if len(quoted) <= MAX_KEY else ""
            self._string = None
        if self._state in (_KEY, _KEY_OR_END):
            self._state = _COLON
            if value is not None:
                self._key = value
                self.failed = self._keys is not None and value not in self._keys
            return
        if value is not None and self._accepts_name is not None:
            self.failed = not self._accepts_name(value)
        self._end_value(end)

    # Numbers, true, false, null

    def _word_part(self, text: str, at: int) -> int:
        found = _WORD.match(text, at)
        assert found is not None
        self._word += text[at : found.end()]
        if len(self._word) > MAX_WORD:
            self.failed = True
        elif found.end() < len(text):
            self._end_word(self._size + found.end())
        return found.end()

    def _end_word(self, end: int) -> None:
        self._in_word = False
        word, self._word = self._word, ""
        if word in _WORDS or _NUMBER.fullmatch(word):
            self._end_value(end)
        else:
            self.failed = True

    # Everything else

    def _structure(self, text: str, at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        c, state = text[at], self._state
        if state in (_VALUE, _VALUE_OR_END):
            return self._begin_value(c, at)
        if state == _COLON:
            self.failed = c != ":"
            self._state = _VALUE
        elif state in (_KEY, _KEY_OR_END):
            if c == '"':
                self._begin_string()
            else:
                self._close(c, at, state == _KEY_OR_END)
        elif c == ",":
            self._state = _KEY if self._stack[-1] == "{" else _VALUE
        else:
            self._close(c, at, True)
        return at + (not self.failed)

    def _begin_value(self, c: str, at: int) -> int:
        if len(self._stack) == 1 and self._key is not None:
            self._from = self._size + at
        if c == '"':
            self._begin_string()
        elif c in "{[":
            self._stack.append(c)
            self._state = _KEY_OR_END if c == "{" else _VALUE_OR_END
            self.failed = len(self._stack) > MAX_DEPTH
        elif c == "-" or (c.isascii() and c.isalnum()):
            self._in_word = True
            return at  # read as a part of the word
        else:
            self._close(c, at, self._state == _VALUE_OR_END)
        return at + (not self.failed)

    def _close(self, c: str, at: int, allowed: bool) -> None:
        if allowed and self._stack and c == ("}" if self._stack[-1] == "{" else "]"):
            self._stack.pop()
            self._end_value(self._size + at + 1)
        else:
            self.failed = True

    def _end_value(self, end: int) -> None:
        if not self._stack:
            self.done = not self.failed
            return
        self._state = _AFTER
        if len(self._stack) == 1 and self._key is not None:
            self._spans[self._key] = (self._from, end)
            self._key = None


def strict_text(text: str) -> str | None:
    """`text` as strict JSON on which all readers agree: itself where it is, else written anew; None if it is none."""
    scanner = JsonScanner()
    used = scanner.feed(text)
    scanner.end()
    if not scanner.done or text[used:].strip():
        return None
    return mended(text.strip(), scanner.strict)


def mended(text: str, strict: bool) -> str:
    """JSON that a JsonScanner accepted, without raw control characters and repeated keys (the last one counts)."""
    repeated = False

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        made = dict(pairs)
        repeated = repeated or len(made) < len(pairs)
        return made

    value = json.loads(text, strict=False, object_pairs_hook=to_dict, parse_float=_finite)
    return text if strict and not repeated else dumped(value)


def _finite(text: str) -> float:
    """JSON has no infinity, which is what Python makes of 1e999."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def dumped(value: Any) -> str:
    """JSON text without escapes that no reader needs; half a surrogate pair, which UTF-8 cannot hold, stays escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


_SURROGATE = re.compile(r"[\ud800-\udfff]")
