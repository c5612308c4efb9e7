"""When data-parallel ranks that share layers run a step together, and when they stop: the rule, without its transport.

Ranks step in waves. Before each step every rank says what it would run, whether it has work, how many requests it has
received, and how many it has heard were sent to all ranks together; each gets everybody's numbers and so decides alike.
A wave ends when nobody has work and as many requests have been received as were sent. Their number is remembered, and
a rank enters the next wave when it hears of a larger one. Every rank hears every number, so either all enter or none.
No rank waits for one that will not come: whatever a rank knows that makes it go on, the others are about to hear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec


class StepNumbers(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What one rank says before a step."""

    rank: int
    turn: int  # counted alike by all ranks
    num_tokens: int = 0  # it would run; 0: nothing can be scheduled now
    only_decodes: bool = True
    has_work: bool = False
    received: int = 0  # requests, those it refused included
    heard: int = 0  # requests sent to all ranks together, as the sender has told this rank
    leaving: bool = False  # it takes part in no further step, and so nobody can


@dataclass(slots=True, frozen=True)
class Agreed:
    """The same on all ranks."""

    tokens: list[int] = field(default_factory=list)  # of each rank; a rank without work counts one. Empty: no step now
    all_decode: bool = True
    over: bool = False  # the wave has ended


class StepAgreement:
    """One rank's part in it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._turn = 0
        self._received = 0
        self._heard = 0
        self._settled = 0  # requests that were received when the last wave ended
        self._in_wave = False
        self.left = False  # for good

    def on_request(self) -> None:
        """A request was received, whatever becomes of it."""
        self._received += 1

    def on_total(self, total_sent: int) -> None:
        self._heard = max(self._heard, total_sent)

    @property
    def active(self) -> bool:
        """This rank has to take a turn."""
        return not self.left and (self._in_wave or self._heard > self._settled)

    def numbers(self, num_tokens: int, only_decodes: bool, has_work: bool) -> StepNumbers:
        """What to say for this turn."""
        self._in_wave = True
        return StepNumbers(
            rank=self._rank, turn=self._turn, num_tokens=num_tokens, only_decodes=only_decodes, has_work=has_work,
            received=self._received, heard=self._heard)

    def leave(self) -> StepNumbers:
        """What to say instead of a turn, as the last thing."""
        self.left = True
        return StepNumbers(rank=self._rank, turn=self._turn, leaving=True)

    def decide(self, table: Sequence[StepNumbers]) -> Agreed:
        """From everybody's numbers of this turn, by rank."""
        self._turn += 1
        if any(n.leaving for n in table):
            self.left = True
            return Agreed(over=True)
        received = sum(n.received for n in table)
        if not any(n.has_work for n in table) and received == max(n.heard for n in table):
            self._settled, self._in_wave = received, False
            return Agreed(over=True)
        if not any(n.num_tokens for n in table):
            return Agreed()
        return Agreed([max(n.num_tokens, 1) for n in table], all(n.only_decodes for n in table))
