"""What an engine is to be, awake, paused or asleep, and its way there: one message after the other, one answer each.

The loop that owns the scheduler drives this: it hands in messages with `ask`, goes on stepping, and looks with
`advance` after each turn whether the oldest has come about. Rule 51: the KV cache is frozen and drained before memory
goes. Rule 67: the order of things is here, their transactions are the engine's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Protocol

from xllm_npu.execution.engine import SleepUnavailable
from xllm_npu.execution.engine_weights import LoadFailed
from xllm_npu.execution.weight_update import WeightsRefused
from xllm_npu.master.residency_error import WEIGHTS_KEPT
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
    CheckWeights,
    Pause,
    Residency,
    ResidencyMessage,
    Resume,
    Sleep,
    UpdateWeights,
)

CHECK_PAUSE = 0.02  # seconds at most that a check of a checkpoint is waited for, where nothing else is to do


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

    def check_weights(self, checkpoint: str) -> Future[None]:
        """Beside steps. Raises WeightsRefused, and what is fatal."""
        ...

    def load_weights(self, checkpoint: str) -> None:
        """On all ranks, or the old ones again: then LoadFailed is raised. Raises what is fatal."""
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
        self._checked: Future[None] | None = None

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
        if self._checked is not None and not self._checked.done():
            wait((self._checked,), 0.0 if self._scheduler.has_work else CHECK_PAUSE)
            if not self._checked.done():
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
        return isinstance(message, Pause | Sleep | UpdateWeights) and self.state != SLEEPING

    def _begin(self, message: ResidencyMessage) -> None:
        if isinstance(message, Pause | Sleep):
            # Nothing can finish while the memory is gone: those that are there stay.
            asleep = self.state == SLEEPING and message.mode == "wait"
            self._scheduler.pause("keep" if asleep else message.mode)
        elif isinstance(message, CheckWeights):
            self._checked = self._memory.check_weights(message.checkpoint)
        elif isinstance(message, UpdateWeights) and self.state == AWAKE:
            self._scheduler.pause("keep")

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
        elif isinstance(message, CheckWeights):
            self._take_checked()
        elif isinstance(message, UpdateWeights):
            self._update_weights(message.checkpoint)
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

    def _take_checked(self) -> None:
        checked, self._checked = self._checked, None
        assert checked is not None
        try:
            checked.result()
        except WeightsRefused as error:
            raise Refused("checkpoint", str(error)) from error

    def _update_weights(self, checkpoint: str) -> None:
        if self.level == 1 and WEIGHTS_TAG not in self._awake:
            raise Refused("asleep", WEIGHTS_KEPT)
        if KV_CACHE_TAG in self._awake:
            self._scheduler.forget_computed()
        if self.state == AWAKE:
            self.state = PAUSED
        try:
            self._memory.load_weights(checkpoint)
        except LoadFailed as error:
            raise Refused("failed", str(error)) from error

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
