"""Which of a server's models have memory: wake-ups that requests ask for, and room that idle models make for others.

One wake-up a model, however many requests wait for it; one model at a time is made room for, so that two never put
each other to sleep in turns without either having served. Whom a model needs memory from is the least recently used of
those that share a device with it; one that still works keeps its requests, and those that come for it meanwhile wait,
until the other has woken up. What one model's transition is made of is in model_residency.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

from xllm_npu.config.model_list import share_a_device
from xllm_npu.master.llm_master import EngineStatus, ModelSleeping
from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.master.model_set import ModelSet, ServedModel
from xllm_npu.state.messages import PAUSED

STALL_POLL_SECONDS = 0.2  # how soon it is noticed that a model's requests stand still

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WakeUp:
    """One that requests wait for. It holds its model awake until each of them has gone on."""

    task: asyncio.Task[None]
    waiting: int = 0
    hold: ExitStack = field(default_factory=ExitStack)


class ResidencyCoordinator:
    def __init__(self, models: ModelSet, *, auto_wakeup: bool, evict_idle_models: bool, wakeup_timeout: float) -> None:
        """`wakeup_timeout`: seconds that a request waits for its model at most."""
        self._models = models
        self._auto_wakeup = auto_wakeup
        self._evicts = evict_idle_models
        self._timeout = wakeup_timeout
        self._wake_ups: dict[ServedModel, WakeUp] = {}
        self._making_room = asyncio.Lock()
        self._victim: ServedModel | None = None  # is to sleep once its requests have ended
        self._room_made = asyncio.Event()
        models.make_room = self.make_room

    # For requests

    def is_ready(self, model: ServedModel) -> bool:
        """Whether a request can be sent at once."""
        return model.master.status is not EngineStatus.SLEEPING and model is not self._victim

    async def ready(self, model: ServedModel) -> None:
        """Until a request can be sent, waking the model up where that is allowed.

        Raises ModelSleeping where it is not, or takes too long, and ResidencyError where it cannot be done.
        """
        try:
            async with asyncio.timeout(self._timeout):
                while not self.is_ready(model):
                    if model is self._victim:
                        await self._room_made.wait()
                    elif self._auto_wakeup:
                        await self._join_wake_up(model)
                        if model.master.status is not EngineStatus.SLEEPING:
                            return  # even if others want its memory by now: it was woken up for this request
                    else:
                        raise ModelSleeping(f"The model {model.name} is asleep.")
        except TimeoutError:
            raise ModelSleeping(
                f"The model {model.name} did not wake up within {self._timeout:g} seconds.") from None

    async def _join_wake_up(self, model: ServedModel) -> None:
        wake_up = self._wake_ups.get(model)
        if wake_up is None:
            wake_up = self._wake_ups[model] = WakeUp(asyncio.create_task(self._wake_for_requests(model)))
            wake_up.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # they may have left
        wake_up.waiting += 1
        try:
            await asyncio.shield(wake_up.task)
        finally:
            wake_up.waiting -= 1
            if not wake_up.waiting:
                wake_up.hold.close()
                wake_up.task.cancel()  # nobody needs room made; a transition that has begun goes on
                self._forget(model, wake_up)

    async def _wake_for_requests(self, model: ServedModel) -> None:
        wake_up = self._wake_ups[model]
        try:
            await self._wake(model, (), patient=True)
            if wake_up.waiting:
                wake_up.hold.enter_context(model.in_use())
        finally:
            self._forget(model, wake_up)

    def _forget(self, model: ServedModel, wake_up: WakeUp) -> None:
        if self._wake_ups.get(model) is wake_up:
            del self._wake_ups[model]

    # For operators

    async def sleep(self, model: ServedModel, level: int, mode: str) -> None:
        """Raises ResidencyError, as all of these."""
        await model.master.sleep(level, mode)

    async def wake(self, model: ServedModel, tags: Collection[str] = ()) -> None:
        """Idle models make room, where that is allowed; those that work are left alone."""
        await self._wake(model, tags, patient=False)

    async def make_room(self, model: ServedModel, patient: bool) -> bool:
        """For a model that could not start, or grow: whether another was put to sleep for it.

        `patient`: not only one that idles; its requests may take as long as requests wait for a wake-up.
        """
        if not self._evicts:
            return False
        try:
            async with asyncio.timeout(self._timeout), self._making_room:
                return await self._evict(model, patient=patient)
        except TimeoutError:
            return False

    async def watch(self) -> None:
        """For ever: models get the memory of those that idle when their requests stand still for want of it, or when
        they are started again after a failure and cannot be.
        """
        helped: set[ServedModel] = set()  # since they failed last
        while self._evicts:
            for model in list(self._models):
                failed = model.master.status is EngineStatus.RESTARTING and model.master.lacked_memory
                if not failed:
                    helped.discard(model)
                if model in helped or not (failed or model.master.stalled):
                    continue
                if await self.make_room(model, patient=False) and failed:
                    helped.add(model)
            await asyncio.sleep(STALL_POLL_SECONDS)

    async def _wake(self, model: ServedModel, tags: Collection[str], *, patient: bool) -> None:
        """`patient`: wait for requests of the model that is to make room."""
        if not self._evicts:
            await model.master.wake(tags)
            return
        async with self._making_room:
            while True:
                try:
                    await model.master.wake(tags)
                    return
                except ResidencyError as error:
                    if error.code != "memory" or not await self._evict(model, patient=patient):
                        raise

    async def _evict(self, needy: ServedModel, *, patient: bool) -> bool:
        """Put the least recently used model that has memory to sleep, an idle one before one that works."""
        candidates = [model for model in self._models if model is not needy and _holds_memory(model)
                      and share_a_device(model.master.settings, needy.master.settings)]
        for victim in sorted(candidates, key=lambda model: (model.in_flight > 0, model.last_use)):
            if victim.in_flight and not patient:
                return False
            try:
                await self._put_to_sleep(victim)
            except ResidencyError as error:
                log.warning("the model %s cannot make room: %s", victim.name, error)
                continue
            log.info("the model %s sleeps, to make room for %s", victim.name, needy.name)
            return True
        return False

    async def _put_to_sleep(self, victim: ServedModel) -> None:
        self._victim = victim
        self._room_made.clear()
        try:
            while victim.in_flight:
                await victim.idle.wait()
            if not _holds_memory(victim):
                return
            try:
                await victim.master.sleep(1, "wait")
            except ResidencyError as error:
                if error.code != "memory":
                    raise
                await victim.master.sleep(2, "wait")  # the host has no room for its weights: they are loaded again
        finally:
            self._victim = None
            self._room_made.set()


def _holds_memory(model: ServedModel) -> bool:
    """Whether sleep would give something back."""
    master = model.master
    return (master.settings.kv_cache.enable_vmm_weights and bool(master.residency.tags)
            and master.status in (EngineStatus.READY, EngineStatus.SLEEPING)
            and master.residency.state != PAUSED)  # an operator has paused it, and will go on with it
