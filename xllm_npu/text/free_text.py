"""Grammars of free text: any text with any tokens in it, but for some markup that it may not begin.

Reasoning with a budget needs it for what comes after, and tools whose calls are held to their schemas need it for what
comes around: as soon as the marker of a call comes up, a call follows. Ordinary text is one lexeme from one marker to
the next. Written in llguidance's Lark over `CallGrammar`; knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xllm_npu.text.call_grammar import CallGrammar, Expression

_ANY, _SOME = "/(?s:.*)/", "/(?s:.+)/"


@dataclass(frozen=True, slots=True)
class Barred:
    """Markers that may not be in a text; and terminals of Lark that it may not begin with, nor the text after a marker.

    All markers here are tokens.
    """

    markers: frozenset[str] = frozenset()
    first: tuple[str, ...] = ()
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, other: Barred) -> Barred:
        after = {marker: self.after.get(marker, ()) + other.after.get(marker, ())
                 for marker in (*self.after, *other.after)}
        return Barred(self.markers | other.markers, self.first + other.first, after)


NOTHING_BARRED = Barred()


def barred(grammar: CallGrammar, *openers: str) -> Barred:
    """What keeps markup from beginning that these open: their tokens, or where there is more to them the text after.

    Openers without tokens are barred from the beginning of the text alone, which is where reasoning begins.
    """
    result = NOTHING_BARRED
    for opener in openers:
        marker, rest = first_marker(grammar, opener)
        if not marker:
            result |= Barred(first=(f"/\\s*/ {grammar.terminal(opener)}",))
        elif rest:
            result |= Barred(after={marker: (grammar.terminal(rest),)})
        else:
            result |= Barred(frozenset((marker,)))
    return result


def first_marker(grammar: CallGrammar, text: str) -> tuple[str, str]:
    """The first marker token in `text` ("" if there is none), and the text from there to the next one."""
    pieces = grammar.pieces(text)
    at = next((i for i, piece in enumerate(pieces) if grammar.is_marker(piece)), None)
    if at is None:
        return "", text
    rest = pieces[at + 1] if at + 1 < len(pieces) else ""
    return pieces[at], "" if grammar.is_marker(rest) else rest


@dataclass(frozen=True, slots=True)
class Calls:
    """`trigger` begins them, and `rest` is what follows it; `several`: more than once."""

    trigger: str
    rest: Expression
    several: bool


class FreeText:
    def __init__(self, grammar: CallGrammar, may_not: Barred, calls: Calls | None = None) -> None:
        self._grammar, self._calls = grammar, calls
        self._trigger = ""  # from its first token on, if it has one
        if calls is not None:
            marker, _ = first_marker(grammar, calls.trigger)
            if marker:
                self._trigger = calls.trigger[calls.trigger.index(marker):]
                may_not |= barred(grammar, calls.trigger)
        self._barred = may_not

    def expression(self) -> Expression:
        """The whole of it; it may be empty."""
        if self._calls is None:
            return self._without_calls(self._text(first=True), self._text())
        return self._around_tokens(self._calls) if self._trigger else self._around_text(self._calls)

    def _around_tokens(self, calls: Calls) -> Expression:
        first, text = self._text(first=True), self._text()
        call = self._grammar.sequence(self._trigger, calls.rest)
        if calls.several:
            return self._without_calls(first, text, f"{call} {text}?")
        return self._named(f"{self._without_calls(first, text)} ({call} {self._without_calls(text, text)})?")

    def _around_text(self, calls: Calls) -> Expression:
        """The trigger ends a lexeme that is matched lazily, and so comes before the text that could have it too."""
        first, text = self._text(first=True), self._text()
        begin, again = self._up_to(calls.trigger, first=True), self._up_to(calls.trigger)
        if calls.several:
            run = self._named(f"({again} {calls.rest})* {text}?")
            begun = self._named(f"{first}? | {begin} {calls.rest} {run}")
            markers = self._markers(run)
            return self._named(f"{begun} ({markers})*") if markers else begun
        silent = self._text(without=calls.trigger)
        quiet = self._without_calls(silent, silent)
        before = self._without_calls(first, text)
        ways = [before, f"{begin} {calls.rest} {quiet}"]
        other = self._other()
        if other:
            ways.append(f"{before} {other} {again} {calls.rest} {quiet}")
        return self._named(" | ".join(ways))

    def _without_calls(self, first: Expression, text: Expression, more: str = "") -> Expression:
        ways = [way for way in (self._markers(Expression(f"{text}?")), more) if way]
        return self._named(f"{first}? ({' | '.join(ways)})*" if ways else f"{first}?")

    def _markers(self, text: Expression) -> str:
        """A marker token and the text after it, which is `text` for most of them; "" where there are none."""
        ways = [f"{self._grammar.sequence(marker)} {self._text(self._barred.after[marker])}?"
                for marker in sorted(self._barred.after)]
        other = self._other()
        return " | ".join([f"{other} {text}", *ways] if other else ways)

    def _other(self) -> Expression | None:
        return self._grammar.any_marker_but({*self._barred.markers, *self._barred.after})

    # Lexemes

    def _text(self, barred: Sequence[str] = (), first: bool = False, without: str = "") -> Expression:
        """Some ordinary text. `first`: the beginning of it all."""
        may_not = [f"{one} {_ANY}" for one in dict.fromkeys((*barred, *(self._barred.first if first else ())))]
        if without:
            may_not.append(f"{_ANY} {self._grammar.terminal(without)} {_ANY}")
        return self._grammar.terminal_but(_SOME, may_not)

    def _up_to(self, trigger: str, first: bool = False) -> Expression:
        may_not = [f"{one} {_ANY}" for one in (self._barred.first if first else ())]
        whole = self._grammar.terminal_but(f"{_ANY} {self._grammar.terminal(trigger)}", may_not)
        return self._grammar.rule(whole, "[lazy]")

    def _named(self, lark: str) -> Expression:
        return self._grammar.rule(Expression(lark))
