"""One model's pauses, sleep, wake-up and new weights over all its engines: one transition at a time, all ranks or none.

Every transition goes through the state "paused" on all ranks: none is told to sleep before all have paused, and none
to resume before all have their memory, so that no rank waits in a step for one that sleeps. If one rank cannot, the
others go back to what they were. A transition that has begun goes on when its caller leaves. Knows no request and no
text; the engines' order of things is in engine_residency.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from xllm_npu.master.engine_group import EngineGroup, EnginesGone
from xllm_npu.master.residency_error import (
    WEIGHTS_KEPT,
    ResidencyError,
    check_can_sleep,
    check_level,
    check_mode,
    check_tags,
)
from xllm_npu.state.messages import (
    AWAKE,
    PAUSED,
    SLEEPING,
    TAGS,
    WEIGHTS_TAG,
    CheckWeights,
    Pause,
    PauseMode,
    Residency,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)

log = logging.getLogger(__name__)

@dataclass(slots=True, frozen=True)
class ResidencyState:
    state: str = AWAKE  # awake, paused, sleeping
    level: int = 0  # of sleep: 1 weights in host memory, 2 dropped; 0 unless sleeping
    tags: tuple[str, ...] = TAGS  # whose memory is there: "weights", "kv_cache"
    since: float = 0.0  # time.time() of the last change
    transition: str = ""  # sleep, wake, pause, resume or update, while one goes on
    last_seconds: dict[str, float] = field(default_factory=dict)  # of the last one of each that came about
    freed_bytes: int = 0  # by the last sleep, on all ranks


@dataclass(slots=True, frozen=True)
class ServedWeights:
    """Where the weights that are served come from; engines that replace these load the same."""

    checkpoint: str  # directory or hub id, as it was given
    version: int = 0  # how often they were replaced since the server started
    label: str = ""  # what the operator calls them


@dataclass(slots=True, frozen=True)
class ResidencyEvents:
    on_change: Callable[[], object]  # `state` is another
    on_transition: Callable[[str, float, str], object]  # name, seconds, error code or ""


class Searches(Protocol):
    """Requests of several parts, which engines cannot know to be unfinished."""

    @property
    def searching(self) -> bool: ...

    async def wait_searched(self) -> None:
        """Until there are none."""
        ...


class ModelResidency:
    def __init__(
        self, engines: Callable[[], EngineGroup], can_sleep: bool, searches: Searches, events: ResidencyEvents,
        weights: ServedWeights,
    ) -> None:
        """`engines`: those that serve now. `can_sleep`: settings let their memory go. `weights`: that they load."""
        self._engines, self._can_sleep, self._searches, self._events = engines, can_sleep, searches, events
        self.state = ResidencyState(since=time.time())
        self.weights = weights
        self.ready = False  # the engines have loaded
        self._wanted: Sleep | Pause | None = None  # what holds, for engines that replace these
        self._lock = asyncio.Lock()
        self._group: EngineGroup  # of the transition that goes on
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def serves(self) -> bool:
        """Requests that are sent now are served, perhaps after a pause."""
        return self.state.state != SLEEPING and self.state.transition != "sleep"

    async def sleep(self, level: int, mode: str) -> None:
        """Give memory back: 1 keeps weights in host memory, 2 drops them. Raises ResidencyError."""
        checked = check_mode(mode)
        check_level(level)
        check_can_sleep(self._can_sleep)
        await self._run("sleep", lambda: self._sleep(level, checked))

    async def wake(self, tags: Collection[str]) -> None:
        """Take memory again, all of it or that of `tags`; steps run again when all is there. Raises ResidencyError."""
        check_tags(tags)
        await self._run("wake", lambda: self._wake(list(tags)))

    async def pause(self, mode: str) -> None:
        """Run no steps, keep all memory. New requests wait. Raises ResidencyError."""
        checked = check_mode(mode)
        await self._run("pause", lambda: self._pause(checked))

    async def resume(self) -> None:
        """The end of `pause`. Raises ResidencyError while asleep."""
        await self._run("resume", self._resume)

    async def update_weights(self, checkpoint: str, mode: str, label: str) -> int:
        """Replace the weights by those of another checkpoint, on all ranks or none; their version.

        Raises ResidencyError. The checkpoint is checked first, while steps run. Who is paused stays so, and weights
        that level 2 has dropped come from there with the wake-up.
        """
        checked, updated = check_mode(mode), list[ServedWeights]()

        async def update() -> None:
            await self._update(checkpoint, checked, label)
            updated.append(self.weights)

        await self._run("update", update)
        return updated[0].version

    async def restore(self) -> None:
        """New engines, which are awake, become what the old ones were. Raises ResidencyError."""
        wanted = self._wanted
        if isinstance(wanted, Sleep):
            await self._run("sleep", lambda: self._sleep(wanted.level, wanted.mode))
        elif wanted is not None:
            await self._run("pause", lambda: self._pause(wanted.mode))

    def forget(self) -> None:
        """The engines have ended, and with them their state."""
        self.ready = False
        self._set(state=AWAKE, level=0, tags=TAGS)

    @property
    def slept(self) -> bool:
        """New engines are to sleep, as the old ones did."""
        return isinstance(self._wanted, Sleep)

    # One at a time

    async def _run(self, name: str, transition: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._alone(name, transition))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)  # nobody else will
            raise

    async def _alone(self, name: str, transition: Callable[[], Awaitable[None]]) -> None:
        async with self._lock:
            if not self.ready:
                raise ResidencyError("not_ready", "The model is not loaded.")
            began = time.monotonic()
            self._group = self._engines()  # those alone: others that replace them are not what this is about
            self._set(transition=name)
            try:
                await transition()
            except EnginesGone as error:
                self._end(name, began, "gone")
                raise ResidencyError("gone", str(error)) from error
            except ResidencyError as error:
                self._end(name, began, error.code)
                raise
            self._end(name, began, "")

    def _end(self, name: str, began: float, code: str) -> None:
        seconds = time.monotonic() - began
        if code:
            self._set(transition="")
        else:
            self._set(transition="", last_seconds={**self.state.last_seconds, name: seconds})
        self._events.on_transition(name, seconds, code)

    # The transitions

    async def _pause(self, mode: PauseMode) -> None:
        await self._quiet(mode)
        if self.state.state == AWAKE:
            self._set(state=PAUSED)
            self._wanted = Pause("keep")

    async def _quiet(self, mode: PauseMode) -> None:
        """No engine runs steps."""
        if self.state.state == SLEEPING and mode != "abort":
            return  # nothing could finish now: those that are open stay
        self._accept(await self._group.ask(Pause(mode)))
        if mode == "keep" or not self._searches.searching:
            return
        if mode == "wait":
            await self._searches.wait_searched()
        # What searches sent when they heard of the last step before the pause is finished too, or ended.
        self._accept(await self._group.ask(Pause(mode)))

    async def _resume(self) -> None:
        if self.state.state == SLEEPING:
            raise ResidencyError("asleep", "The model sleeps: wake it up.")
        if self.state.state == PAUSED:
            await self._go_on()

    async def _go_on(self) -> None:
        self._accept(await self._group.ask(Resume()))
        self._wanted = None
        self._set(state=AWAKE, level=0, tags=TAGS)

    async def _sleep(self, level: int, mode: PauseMode) -> None:
        before = self.state
        await self._quiet(mode)
        if before.state == SLEEPING and level <= before.level and not before.tags:
            return
        answers = await self._group.ask(Sleep(level, "keep"))
        failed = [a for a in answers.values() if a.error]
        if failed:
            await self._undo_sleep(before, answers)
            raise _error(failed[0])
        level = max(a.level for a in answers.values())
        self._wanted = Sleep(level, "keep")
        self._set(state=SLEEPING, level=level, tags=(),
                  freed_bytes=sum(a.freed_bytes for a in answers.values()))

    async def _undo_sleep(self, before: ResidencyState, answers: dict[int, Residency]) -> None:
        if before.state == SLEEPING:  # deeper on some ranks
            self._set_what_all_have(answers)
            return
        asleep = [rank for rank, a in answers.items() if not a.error]
        if asleep:
            answers = answers | await self._group.ask(Wake([]), asleep)
            if any(answers[rank].error for rank in asleep):  # their memory is gone meanwhile: a later wake-up gets it
                self._wanted = Sleep(max(a.level for a in answers.values()), "keep")
                self._set_what_all_have(answers)
                return
        if before.state == AWAKE:
            await self._go_on()

    def _set_what_all_have(self, answers: dict[int, Residency]) -> None:
        """Some sleep, and none runs."""
        tags = tuple(tag for tag in TAGS if all(tag in a.tags for a in answers.values()))
        self._set(state=SLEEPING, level=max(a.level for a in answers.values()), tags=tags)

    async def _wake(self, tags: list[str]) -> None:
        before = self.state
        missing = [tag for tag in tags or TAGS if tag not in before.tags]
        if before.state == SLEEPING and missing:
            answers = await self._group.ask(Wake(missing))
            failed = [a for a in answers.values() if a.error]
            if failed:
                await self._undo_wake(before, answers)
                raise _error(failed[0])
            self._set(tags=tuple(tag for tag in TAGS if tag in before.tags or tag in missing))
        if len(self.state.tags) == len(TAGS) and self.state.state != AWAKE:
            await self._go_on()

    async def _undo_wake(self, before: ResidencyState, answers: dict[int, Residency]) -> None:
        """Those that woke up sleep again, all of them: an engine does not sleep by halves."""
        if any(not a.error for a in answers.values()):
            self._set_what_all_have(await self._group.ask(Sleep(before.level, "keep")))

    async def _update(self, checkpoint: str, mode: PauseMode, label: str) -> None:
        before = self.state
        if before.state == SLEEPING and before.level == 1 and WEIGHTS_TAG not in before.tags:
            raise ResidencyError("asleep", WEIGHTS_KEPT)
        self._accept(await self._group.ask(CheckWeights(checkpoint)))
        await self._quiet(mode)
        answers = await self._group.ask(UpdateWeights(checkpoint))
        failed = [a for a in answers.values() if a.error]
        if failed:
            await self._undo_update([rank for rank, a in answers.items() if not a.error])
        else:
            self.weights = ServedWeights(checkpoint, self.weights.version + 1, label)
        if before.state == AWAKE:
            await self._go_on()
        if failed:
            raise _error(failed[0])

    async def _undo_update(self, updated: list[int]) -> None:
        """Engines that could not load have their old weights again; those that could get theirs too."""
        if not updated:
            return
        answers = await self._group.ask(UpdateWeights(self.weights.checkpoint), updated)
        lost = [a.error for a in answers.values() if a.error]
        if lost:
            log.error("the old weights cannot be loaded again: %s", lost[0])
            reason = "The engines have different weights, and the old ones cannot be loaded again; the log says why."
            self._group.fail(reason)
            raise EnginesGone(reason)

    @staticmethod
    def _accept(answers: dict[int, Residency]) -> None:
        for answer in answers.values():
            if answer.error:
                raise _error(answer)

    def _set(self, **changes: object) -> None:
        if any(name in changes and changes[name] != getattr(self.state, name) for name in ("state", "level", "tags")):
            changes["since"] = time.time()
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self._events.on_change()


def _error(answer: Residency) -> ResidencyError:
    return ResidencyError(answer.reason, answer.error)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("the model's residency has not changed: %s", task.exception())
