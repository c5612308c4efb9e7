"""Ranks that step together: no rank ever waits for one that does not come, whatever arrives when."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from xllm_npu.master.step_agreement import StepAgreement, StepNumbers

RANKS = 3
MANY_TURNS = 300  # more than any schedule below needs


@dataclass
class Message:
    steps: int | None = None  # a request: so many steps of work; 0: it is refused
    total: int = 0  # or the number of requests sent


@dataclass
class SimulatedRank:
    agreement: StepAgreement
    overlap: bool
    on_the_way: deque[Message] = field(default_factory=deque)
    arrived: deque[Message] = field(default_factory=deque)
    unscheduled: int = 0  # steps of work
    in_flight: deque[bool] = field(default_factory=deque)  # is it this rank's work?
    said: StepNumbers | None = None  # it waits for the others
    submitted: int = 0

    def begin_turn(self) -> None:
        """As an engine does: take what has arrived, then say its numbers if a turn is due."""
        assert self.said is None
        while self.arrived:
            message = self.arrived.popleft()
            if message.steps is None:
                self.agreement.on_total(message.total)
            else:
                self.agreement.on_request()
                self.unscheduled += message.steps
        if self.agreement.active:
            work = self.unscheduled > 0 or any(self.in_flight)
            self.said = self.agreement.numbers(int(self.unscheduled > 0), self.unscheduled % 2 == 0, work)

    def end_turn(self, table: list[StepNumbers]) -> tuple:
        agreed = self.agreement.decide(table)
        self.said = None
        if agreed.tokens:
            self.submitted += 1
            self.in_flight.append(self.unscheduled > 0)
            self.unscheduled = max(0, self.unscheduled - 1)
        if len(self.in_flight) > self.overlap or (self.in_flight and not agreed.tokens):
            self.in_flight.popleft()
        return tuple(agreed.tokens), agreed.all_decode, agreed.over


class World:
    def __init__(self, rule: type[StepAgreement], overlap: bool) -> None:
        self.ranks = [SimulatedRank(rule(rank), overlap) for rank in range(RANKS)]
        self.total = 0
        self.turns = 0

    def send(self, rank: int, steps: int) -> None:
        self.ranks[rank].on_the_way.append(Message(steps=steps))
        self.total += 1
        for other in self.ranks:
            other.on_the_way.append(Message(total=self.total))

    def deliver(self, rank: int, count: int) -> None:
        r = self.ranks[rank]
        for _ in range(min(count, len(r.on_the_way))):
            r.arrived.append(r.on_the_way.popleft())

    def turn(self, rank: int) -> None:
        if self.ranks[rank].said is None:
            self.ranks[rank].begin_turn()
        if all(r.said is not None for r in self.ranks):
            table = [r.said for r in self.ranks]
            agreed = {r.end_turn(table) for r in self.ranks}
            assert len(agreed) == 1, "ranks decided differently"
            self.turns += 1
            assert self.turns < MANY_TURNS, "a wave that does not end"

    def settle(self) -> None:
        """Everything arrives; then nobody may be waiting and nothing may be left to do."""
        for rank in range(RANKS):
            self.deliver(rank, len(self.ranks[rank].on_the_way))
        while True:
            before = self.turns, [r.said for r in self.ranks]
            for rank in range(RANKS):
                self.turn(rank)
            if before == (self.turns, [r.said for r in self.ranks]):
                break
        assert [r.said for r in self.ranks] == [None] * RANKS, "a rank waits for one that does not come"
        assert not any(r.unscheduled or r.in_flight or r.agreement.active for r in self.ranks)
        assert len({r.submitted for r in self.ranks}) == 1


RANK = st.integers(0, RANKS - 1)
ACTIONS = st.lists(st.one_of(
    st.tuples(st.just("send"), RANK, st.integers(0, 3)),
    st.tuples(st.just("deliver"), RANK, st.integers(1, 3)),
    st.tuples(st.just("turn"), RANK),
), max_size=40)


def play(actions, rule: type[StepAgreement], overlap: bool) -> World:
    world = World(rule, overlap)
    for name, *arguments in actions:
        getattr(world, name)(*arguments)
    world.settle()
    return world


@given(ACTIONS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_whatever_arrives_when(actions, overlap):
    world = play(actions, StepAgreement, overlap)
    work = sum(arguments[1] for name, *arguments in actions if name == "send")
    assert world.ranks[0].submitted <= work


class OwnWorkOnly(StepAgreement):
    """A rank takes part when it has received something itself."""

    @property
    def active(self):
        return self._in_wave or (self._received > 0 and self._settled < self._heard)


class SettlesWhatWasSent(StepAgreement):
    """A wave ends when nobody has work, though requests may be on the way."""

    def decide(self, table):
        agreed = super().decide(table)
        if not any(n.has_work for n in table):
            self._settled, self._in_wave = max(n.heard for n in table), False
            return type(agreed)(over=True)
        return agreed


class ForgetsRefusals(StepAgreement):
    """Only some requests count as received."""

    def on_request(self):
        self._received += self._received == 0


@pytest.mark.parametrize("rule", [OwnWorkOnly, SettlesWhatWasSent, ForgetsRefusals])
def test_broken_rules_are_found(rule):
    """The simulation is worth something: a schedule that breaks each of these is found."""

    def fails(actions) -> bool:
        try:
            play(actions, rule, overlap=False)
        except AssertionError:
            return True
        return False

    search = settings(max_examples=3000, deadline=None, derandomize=True, phases=[Phase.generate])
    assert find(ACTIONS, fails, settings=search)


def numbers(rank: int, **fields) -> StepNumbers:
    return StepNumbers(rank=rank, turn=0, **fields)


def test_a_step_counts_a_token_for_ranks_without_work():
    agreed = StepAgreement(0).decide([numbers(0), numbers(1, num_tokens=7, only_decodes=False, has_work=True)])
    assert (agreed.tokens, agreed.all_decode, agreed.over) == ([1, 7], False, False)
    agreed = StepAgreement(0).decide([numbers(0), numbers(1, num_tokens=7, has_work=True)])
    assert (agreed.tokens, agreed.all_decode) == ([1, 7], True)


def test_nobody_submits_while_work_is_only_in_flight():
    agreed = StepAgreement(0).decide([numbers(0), numbers(1, has_work=True)])
    assert (agreed.tokens, agreed.over) == ([], False)


def test_one_that_leaves_ends_it_for_good():
    rule = StepAgreement(0)
    rule.on_total(1)
    assert rule.active
    assert rule.decide([numbers(0, heard=1), numbers(1, leaving=True)]).over
    rule.on_total(2)
    assert rule.left
    assert not rule.active
