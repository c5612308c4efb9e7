"""Scheduling policies: which kinds of work enter a step, and in which order.

A policy is a generator of segments over one shared loop (scheduler.py); the loop serves each segment until a budget
runs out. A policy never touches blocks or rows. To add one: a class here or elsewhere, and one line in POLICIES.
"""

from __future__ import annotations

import difflib
import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xllm_npu.state.request import Sequence

if TYPE_CHECKING:
    from xllm_npu.scheduling.running_set import RunningSet
    from xllm_npu.scheduling.step_plan import StepPlan


class UnknownPolicyError(ValueError):
    """The message lists the policies there are."""


class Kind(enum.Enum):
    DECODE = "decode"  # rows that decode one token
    CHUNK = "chunk"  # running prompts that are not computed yet
    ADMIT = "admit"  # waiting sequences
    EXTEND = "extend"  # prompts already in this step, beyond the chunk limit, while tokens are left


@dataclass(slots=True, frozen=True)
class Segment:
    kind: Kind
    rows: npt.NDArray[np.int32] | None = None  # DECODE: only these; None: all, in order
    sequences: list[Sequence] | None = None  # CHUNK: only these; None: all, in order


class Policy(ABC):
    """`reserve_factor` scales used blocks when a new prompt is checked against the whole pool."""

    name: str
    reserve_factor: float = 1.0

    @abstractmethod
    def segments(self, running: RunningSet, plan: StepPlan) -> Iterator[Segment]:
        """Yield work in order. `plan` shows what earlier segments of this step took."""

    def step_seconds(self, running: RunningSet, max_ttft: float, max_tpot: float, now: float) -> float:
        """The latency budget of this step, in seconds, when latency-aware scheduling is on."""
        return max_tpot if running.decode_rows().size else max_ttft


class PrefillFirst(Policy):
    """Prompts first and never together with decodes: best time to first token, decodes stall meanwhile."""

    name = "prefill_first"

    def segments(self, running: RunningSet, plan: StepPlan) -> Iterator[Segment]:
        yield Segment(Kind.CHUNK)
        yield Segment(Kind.ADMIT)
        if not plan.has_prefill:
            yield Segment(Kind.DECODE)

    def step_seconds(self, running: RunningSet, max_ttft: float, max_tpot: float, now: float) -> float:
        return max_ttft


class DecodeFirst(Policy):
    """Every decode, then chunks of prompts in the tokens that are left (Sarathi-Serve, arXiv 2403.02310)."""

    name = "decode_first"
    reserve_factor = 1.1

    def segments(self, running: RunningSet, plan: StepPlan) -> Iterator[Segment]:
        yield Segment(Kind.DECODE)
        yield Segment(Kind.CHUNK)
        yield Segment(Kind.ADMIT)
        if not plan.decode_rows:  # the chunk limit protects decodes; without any, prompts may use what is left
            yield Segment(Kind.EXTEND)


class Unified(Policy):
    """Decodes and prompts in one list by urgency: the time left until each one's next token is due."""

    name = "unified"

    def segments(self, running: RunningSet, plan: StepPlan) -> Iterator[Segment]:
        rows = running.decode_rows()
        deadline = running.table.deadline[rows]
        order = np.argsort(deadline, kind="stable")
        rows, deadline = rows[order], deadline[order]
        begin = 0
        for sequence in running.prefilling():
            due = running.table.deadline[sequence.row]
            end = int(np.searchsorted(deadline, due, side="right"))
            if end > begin:
                yield Segment(Kind.DECODE, rows=rows[begin:end])
                begin = end
            yield Segment(Kind.CHUNK, sequences=[sequence])
        if begin < rows.size:
            yield Segment(Kind.DECODE, rows=rows[begin:])
        yield Segment(Kind.ADMIT)

    def step_seconds(self, running: RunningSet, max_ttft: float, max_tpot: float, now: float) -> float:
        """max(least time left, 0.65 * least TPOT) over the decodes; the prompts' limit without decodes."""
        rows = running.decode_rows()
        if not rows.size:
            return max_ttft
        tpot = min(max_tpot, float(running.table.tpot[rows].min()))
        left = float(running.table.deadline[rows].min()) - now
        return max(min(left, max_tpot), 0.65 * tpot)


POLICIES: dict[str, type[Policy]] = {p.name: p for p in (PrefillFirst, DecodeFirst, Unified)}


def register_policy(policy: type[Policy]) -> None:
    """Make a policy selectable by name (`--scheduling_policy`); for policies outside this package."""
    POLICIES[policy.name] = policy


def get_policy(name: str) -> Policy:
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UnknownPolicyError(
            f"There is no scheduling policy {name}.{hint} Set --scheduling_policy to one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
