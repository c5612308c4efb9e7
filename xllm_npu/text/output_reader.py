"""Reads a text that arrives in pieces as if it were whole: the input side of output parsers.

Parsers are generators that ask a TextReader for "everything up to one of these markers", "this literal", "white space",
"a JSON value"; where the text does not reach far enough yet, the reader yields, and goes on when `push` has brought
more. What has been read is gone, so the work is linear in the text, however it is cut; `keep` records what is read, to
have it back if it was no markup after all. Knows no format and no events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

from xllm_npu.text.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields whenever it needs more text

END = ""  # what `peek` answers at the end of the text

_SPACE = re.compile(r"\s*")


class EndOfText(Exception):
    """The text has ended, and something was to follow."""


class NotMarkup(Exception):
    """What looked like the beginning of markup is not markup."""


class Markers:
    """Strings to look for. The first one in the text counts; none of them may be the beginning of another."""

    __slots__ = ("_begins", "_longest", "_prefixes", "_search", "strings")

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self._search = re.compile("|".join(re.escape(s) for s in self.strings)).search
        self._longest = max(map(len, self.strings)) - 1  # characters of an incomplete marker
        self._prefixes = frozenset(s[:n] for s in self.strings for n in range(1, len(s)))
        firsts = sorted({s[0] for s in self.strings})
        self._begins = re.compile("[" + "".join(map(re.escape, firsts)) + "]").search

    def find(self, text: str) -> re.Match[str] | None:
        return self._search(text)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a marker."""
        start = max(0, len(text) - self._longest)
        found = self._begins(text, start)
        if found is None:
            return 0
        for at in range(found.start(), len(text)):
            if text[at:] in self._prefixes:
                return len(text) - at
        return 0


@lru_cache(maxsize=256)
def markers_of(strings: tuple[str, ...]) -> Markers:
    """The same ones are looked for in every sequence of a model."""
    return Markers(strings)


class Ends:
    """Where a value ends: at one of these markers, if one of its followers comes next after white space.

    `rules`: marker to its followers (END: the end of the text, which `counts_when_cut` or not; none: anything may
    follow) and to whether it counts only at the beginning of a line.
    """

    __slots__ = ("counts_when_cut", "markers", "rules")

    def __init__(self, rules: Mapping[str, tuple[tuple[str, ...], bool]], counts_when_cut: bool = False) -> None:
        self.rules = rules
        self.markers = Markers(rules)
        self.counts_when_cut = counts_when_cut


class TextReader:
    """One text. `ended` and `cut_short` are set by `finish`; `position`: characters that have been read."""

    __slots__ = ("_kept", "_text", "cut_short", "ended", "position")

    def __init__(self) -> None:
        self._text = ""  # not read yet; what may be the beginning of a marker, and what was just pushed
        self._kept: list[str] | None = None
        self.ended = False
        self.cut_short = False
        self.position = 0

    def push(self, text: str) -> None:
        self._text = self._text + text if self._text else text

    def finish(self, cut_short: bool) -> None:
        self.ended, self.cut_short = True, cut_short

    # What was read

    def keep(self, first: str = "") -> None:
        """Record from here on what is read; `first` has just been read."""
        self._kept = [first]

    def kept(self) -> str:
        """The record, and the end of recording."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    # Reading

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self.position += count
        if self._kept is not None and taken:
            self._kept.append(taken)
        return taken

    def more(self) -> Steps[None]:
        """Wait for text. Raises EndOfText if none will come."""
        if self.ended:
            raise EndOfText
        yield

    def until(self, markers: Markers, sink: Callable[[str], object]) -> Steps[str]:
        """Read up to and with the first marker, and return it; the text before it goes to `sink` as it comes.

        Raises EndOfText when there is no marker, with all text read.
        """
        while True:
            found = markers.find(self._text)
            if found is not None:
                if found.start():
                    sink(self._take(found.start()))
                return self._take(len(found.group()))
            held = 0 if self.ended else markers.held(self._text)
            if len(self._text) > held:
                sink(self._take(len(self._text) - held))
            yield from self.more()

    def rest(self) -> Steps[str]:
        """All text that there is, at least a character. Raises EndOfText."""
        while not self._text:
            yield from self.more()
        return self._take(len(self._text))

    def text_until(self, markers: Markers) -> Steps[tuple[str, str]]:
        """The text up to the first marker, and the marker; both are read."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def value(self, ends: Ends) -> Steps[tuple[str, str]]:
        """The text up to the first of `ends` that counts, and its marker; white space after it is read too."""
        parts: list[str] = []
        marker = yield from self.stream(ends, parts.append)
        return "".join(parts), marker

    def stream(self, ends: Ends, sink: Callable[[str], object]) -> Steps[str]:
        """Read up to and with the first of `ends` that counts, and return it; the text before goes to `sink`.

        An end that is written in the value itself is not followed by what comes after a value, and so does not count.
        """
        before = "\n"  # the last character

        def pass_on(text: str) -> None:
            nonlocal before
            before = text[-1]
            sink(text)

        while True:
            marker = yield from self.until(ends.markers, pass_on)
            followers, at_line_start = ends.rules[marker]
            if not at_line_start or before == "\n":
                if not followers:
                    return marker
                space = yield from self.space()
                found = yield from self.peek([f for f in followers if f])
                if found or (found == END and END in followers and (ends.counts_when_cut or not self.cut_short)):
                    return marker
                marker += space
            pass_on(marker)

    def space(self) -> Steps[str]:
        """Read all white space that comes next; at the end of the text, what there is."""
        parts: list[str] = []
        while True:
            found = _SPACE.match(self._text)
            assert found is not None
            if found.end():
                parts.append(self._take(found.end()))
            if self._text or self.ended:
                return "".join(parts)
            yield

    def peek(self, options: Iterable[str]) -> Steps[str | None]:
        """Which of `options` comes next; nothing is read. END at the end of the text, None for anything else."""
        while True:
            text = self._text
            if not text and self.ended:
                return END
            for option in options:
                if text.startswith(option):
                    return option
            if self.ended or not any(option.startswith(text) for option in options):
                return None
            yield

    def accept(self, *options: str) -> Steps[str | None]:
        """Read the one of `options` that comes next; if none does, nothing is read and the answer is None."""
        found = yield from self.peek(options)
        return self._take(len(found)) if found else None

    def accept_end(self, *options: str) -> Steps[str | None]:
        """Like `accept`, of what ends markup. Raises EndOfText where the text ends within it."""
        found = yield from self.accept(*options)
        if found is None and self.ended and self._text and any(option.startswith(self._text) for option in options):
            self._take(len(self._text))
            raise EndOfText
        return found

    def expect(self, *options: str) -> Steps[str]:
        """Read one of `options`. Raises NotMarkup if something else comes, EndOfText where the text ends before."""
        found = yield from self.accept_end(*options)
        if found is None:
            if self.ended and not self._text:
                raise EndOfText
            raise NotMarkup
        return found

    def chars(self, count: int) -> Steps[str]:
        """The next `count` characters. Raises EndOfText."""
        while len(self._text) < count:
            yield from self.more()
        return self._take(count)

    def matching(self, run: re.Pattern[str], limit: int) -> Steps[str]:
        """Read the longest run that `run` (a repeated class of characters) matches, up to `limit` characters."""
        parts: list[str] = []
        size = 0
        while True:
            found = run.match(self._text)
            if found is not None and found.end():
                size += found.end()
                if size > limit:
                    raise NotMarkup
                parts.append(self._take(found.end()))
            if self._text or self.ended:
                return "".join(parts)
            yield

    def json(self, scanner: JsonScanner) -> Steps[None]:
        """Read one JSON value with `scanner`. Raises NotMarkup where it is none, EndOfText where it is incomplete."""
        while True:
            if self._text:
                self._take(scanner.feed(self._text))
            if scanner.done:
                return
            if scanner.failed:
                raise NotMarkup
            yield from self.more()
