"""What an engine is to be, awake, paused or asleep, and its way there: one message after the other, one answer each.

The loop that owns the scheduler drives this: it hands in messages with `ask`, goes on stepping, and looks with
`advance` after each turn whether the oldest has come about. Rule 51: the KV cache is frozen and drained before memory
goes. Rule 67: the order of things is here, their transactions are the engine's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from xllm_npu.execution.engine import SleepUnavailable
from xllm_npu.memory.coordinator import SleepFailed
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.kv_cache.page_allocator import NOT_FOR_MEMORY, PageGrowthRefused
from xllm_npu.state.messages import (
    AWAKE,
    KV_CACHE_TAG,
    PAUSED,
    SLEEPING,
    TAGS,
    WEIGHTS_TAG,
    Pause,
    Residency,
    ResidencyMessage,
    Resume,
    Sleep,
)


class SleepingMemory(Protocol):
    """What this needs of `execution.engine.Engine`."""

    def sleep(self, level: int) -> int:
        """Bytes that all ranks gave back; nothing is in flight and no KV block is in use.

        Raises SleepUnavailable, SleepFailed, and what is fatal.
        """
        ...

    def wake(self, tags: Collection[str]) -> None:
        """Memory for all of these on all ranks, or for none (rule 49). Raises PageGrowthRefused, and what is fatal."""
        ...


class Refused(RuntimeError):
    """It cannot be done, and nothing has changed. `reason` as in `Residency`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineResidency:
    def __init__(
        self, scheduler: Scheduler, memory: SleepingMemory, settled: Callable[[], bool] = lambda: True,
        on_resume: Callable[[], object] = lambda: None,
    ) -> None:
        """`settled`: whether, with a quiet scheduler, no other engine needs this one's steps. `on_resume` hears of
        each Resume when its turn comes, whatever becomes of it.
        """
        self._scheduler, self._memory, self._settled, self._on_resume = scheduler, memory, settled, on_resume
        self.state = AWAKE
        self.level = 0
        self._awake = frozenset(TAGS)  # what has its memory
        self._asked: deque[tuple[ResidencyMessage, float]] = deque()
        self._begun = False  # the oldest of those

    def ask(self, message: ResidencyMessage) -> None:
        self._asked.append((message, time.monotonic()))

    def advance(self) -> Residency | None:
        """The answer to the oldest message, once it has come about; to be called after every turn."""
        if not self._asked:
            return None
        message, since = self._asked[0]
        if not self._begun:
            self._begun = True
            self._begin(message)
        if self._must_be_quiet(message) and not (self._scheduler.quiet and self._settled()):
            return None
        self._asked.popleft()
        self._begun = False
        answer = Residency(state="", level=0, tags=[], seconds=0.0)
        try:
            answer.freed_bytes = self._finish(message)
        except Refused as refusal:
            answer.error, answer.reason = str(refusal), refusal.reason
        except PageGrowthRefused as refusal:
            memory = refusal.reason not in NOT_FOR_MEMORY
            answer.error, answer.reason = str(refusal), "memory" if memory else "failed"
        answer.state, answer.level = self.state, self.level
        answer.tags = [tag for tag in TAGS if tag in self._awake]
        answer.seconds = time.monotonic() - since
        return answer

    def _must_be_quiet(self, message: ResidencyMessage) -> bool:
        return isinstance(message, Pause | Sleep) and self.state != SLEEPING

    def _begin(self, message: ResidencyMessage) -> None:
        if isinstance(message, Pause | Sleep):
            # Nothing can finish while the memory is gone: those that are there stay.
            asleep = self.state == SLEEPING and message.mode == "wait"
            self._scheduler.pause("keep" if asleep else message.mode)

    def _finish(self, message: ResidencyMessage) -> int:
        """Returns bytes given back. Raises Refused, PageGrowthRefused, and what is fatal."""
        if isinstance(message, Pause):
            if self.state == AWAKE:
                self.state = PAUSED
        elif isinstance(message, Resume):
            self._on_resume()
            if self.state == SLEEPING:
                raise Refused("asleep", "The model sleeps; it has to be woken up.")
            self._scheduler.resume()
            self.state = AWAKE
        elif isinstance(message, Sleep):
            return self._sleep(message.level)
        else:
            self._wake(frozenset(message.tags or TAGS))
        return 0

    def _sleep(self, level: int) -> int:
        if self.state == SLEEPING and not self._awake and level <= self.level:
            return 0
        if WEIGHTS_TAG not in self._awake:
            level = max(level, self.level)  # what is dropped stays so
        if KV_CACHE_TAG in self._awake:
            self._scheduler.let_go()
        try:
            freed = self._memory.sleep(level)
        except (SleepUnavailable, SleepFailed) as error:
            if KV_CACHE_TAG in self._awake:
                self._scheduler.take_hold()
            if self.state != SLEEPING:
                self.state = PAUSED
            raise Refused("unsupported" if isinstance(error, SleepUnavailable) else "failed", str(error)) from error
        self.state, self.level, self._awake = SLEEPING, level, frozenset()
        return freed

    def _wake(self, tags: frozenset[str]) -> None:
        missing = tags - self._awake
        if not missing:
            return
        self._memory.wake(missing)
        self._awake |= missing
        if KV_CACHE_TAG in missing:
            self._scheduler.take_hold()
        if self._awake == frozenset(TAGS):
            self.state, self.level = PAUSED, 0
