"""The models of one server, by the names that requests give: each has a master, and so engine processes, of its own.

What happens to one (its start, a crash, a restart) is its own affair; the set starts them one after the other, because
each measures the memory that those before it left, and ends them together. They share the ledgers of the machine's
devices, in a directory that goes with the set, or with the engines where this process is killed. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from xllm_npu.config.settings import Settings, served_model_names, spans_machines
from xllm_npu.master.engine_group import new_directory
from xllm_npu.master.llm_master import EngineStatus, LLMMaster
from xllm_npu.master.model_residency import ResidencyError

if TYPE_CHECKING:
    from xllm_npu.state.messages import EngineProgress

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # how soon a change of an engine's status is noticed

NewMaster = Callable[[Settings], LLMMaster]
# Whether there is more memory for it now; and whether a model that works may be waited for.
MakeRoom = Callable[["ServedModel", bool], Awaitable[bool]]


class UnknownModel(LookupError):
    """No model is served under this name."""


class StartFailed(RuntimeError):
    """A model cannot be served; the message names it where there are several, and says why."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model and who uses it now."""

    names: tuple[str, ...]  # the first one is shown
    master: LLMMaster
    new_master: Callable[[], LLMMaster] | None = None  # for another try to start it
    in_flight: int = 0  # requests that were routed to it and have not ended
    last_use: float = field(default_factory=time.monotonic)  # when a request began or ended
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while there is no request

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def name(self) -> str:
        return self.names[0]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a request runs."""
        self.in_flight += 1
        self.idle.clear()
        self.last_use = time.monotonic()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.last_use = time.monotonic()
            if not self.in_flight:
                self.idle.set()


class ModelSet:
    """In the order in which they were named; the first serves requests that name none. Never empty."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = list(models)
        self._by_name = {name: model for model in models for name in model.names}
        self._started: list[LLMMaster] = []
        self._forks: dict[str, tuple[ServedModel, asyncio.Task[ServedModel]]] = {}  # by name, with their parents
        self.on_progress: Callable[[ServedModel, EngineProgress], None] = lambda model, progress: None
        self.make_room: MakeRoom = _no_room  # asked for a model that does not start for want of memory
        self._updating: set[ServedModel] = set()  # their weights are being replaced
        self._ledgers = new_directory()

    @classmethod
    def of_settings(cls, settings: Sequence[Settings], new_master: NewMaster = LLMMaster) -> ModelSet:
        """One model for each of `settings`; no two of them may have a name in common."""
        return cls([ServedModel(served_model_names(one), new_master(one), partial(new_master, one))
                    for one in settings])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> ServedModel:
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may give."""
        return tuple(self._by_name)

    def of(self, name: str | None) -> ServedModel:
        """Raises UnknownModel. No name means the first model."""
        if not name:
            return self.first
        model = self._by_name.get(name)
        if model is None:  # the name of an adapter means its model
            model = next((one for one in self._models if one.master.adapters.get(name) is not None), None)
        if model is None:
            raise UnknownModel(name)
        return model

    def is_taken(self, name: str) -> bool:
        """Whether requests that give this name go somewhere already."""
        return bool(name) and (name in self._by_name or name in self._forks or any(
            one.master.adapters.get(name) is not None for one in self._models))

    @property
    def alive(self) -> bool:
        """Whether any of them can serve, now or later."""
        return any(model.master.status is not EngineStatus.DEAD for model in self._models)

    async def start(self) -> None:
        """Until all are ready. Raises StartFailed for the first that cannot be."""
        for model in self._models:
            await self._start(model, patient=True)

    async def _start(self, model: ServedModel, patient: bool) -> None:
        while True:
            try:
                await self._start_once(model)
                return
            except StartFailed:
                if not model.master.lacked_memory or model.new_master is None:
                    raise
                if not await self.make_room(model, patient):
                    raise
            await model.master.shutdown(0)
            model.master = model.new_master()

    async def _start_once(self, model: ServedModel) -> None:
        model.master.ledgers = self._ledgers
        model.master.on_progress = partial(self._on_progress, model)
        self._started.append(model.master)
        try:
            await _unbroken(model.master.start())
        except Exception as error:
            raise StartFailed(self.told("The engine could not be started", model, str(error))) from error
        while model.master.status is EngineStatus.LOADING:  # noqa: ASYNC110  # a master tells nobody
            await asyncio.sleep(POLL_SECONDS)
        if model.master.status is EngineStatus.DEAD:
            raise StartFailed(self.told("Cannot start", model, model.master.failure))

    async def fork(self, source: str, new_name: str) -> ServedModel:
        """Serve `source` a second time under another name, sharing its weights.

        The same fork again changes nothing while it lives. Raises UnknownModel, and ResidencyError where it cannot be
        done.
        """
        parent = self.of(source)
        await self._forget_dead_fork(new_name)
        task = self._forks.get(new_name)
        if task is not None and task[0] is parent:
            return await asyncio.shield(task[1])
        if self.is_taken(new_name):
            raise ResidencyError("invalid", f"A model is called {new_name} already.")
        forking = asyncio.create_task(self._fork(parent, new_name))
        self._forks[new_name] = (parent, forking)
        forking.add_done_callback(partial(self._on_forked, new_name))
        return await asyncio.shield(forking)

    async def update_weights(self, model: ServedModel, checkpoint: str, mode: str, label: str = "") -> int:
        """Replace its weights, which must be its own alone; their version. Raises ResidencyError."""
        sharers = [name for name, (parent, _) in self._forks.items() if parent is model and not self._is_dead(name)]
        if model.master.parent is not None or sharers:
            other = f"its fork {sharers[0]}" if sharers else "the model that it is a fork of"
            raise ResidencyError("shared", f"The weights of {model.name} are those of {other} too, and cannot be "
                                 "replaced.")
        self._updating.add(model)
        try:
            return await model.master.update_weights(checkpoint, mode, label)
        finally:
            self._updating.discard(model)

    def _is_dead(self, name: str) -> bool:
        return name in self._by_name and self._by_name[name].master.status is EngineStatus.DEAD

    def _on_forked(self, name: str, task: asyncio.Task[ServedModel]) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._forks[name]

    async def _forget_dead_fork(self, name: str) -> None:
        """What is left of it goes: sockets, their directory, threads."""
        model = self._by_name.get(name)
        if name in self._forks and model is not None and model.master.status is EngineStatus.DEAD:
            self._models.remove(model)
            del self._by_name[name], self._forks[name]
            self._started.remove(model.master)
            await model.master.shutdown(0)

    async def _fork(self, parent: ServedModel, name: str) -> ServedModel:
        if parent.master.status is not EngineStatus.READY:
            raise ResidencyError("asleep", f"The model {parent.name} is not awake, and so has no weights to share.")
        if parent in self._updating or parent.master.residency.transition == "update":
            raise ResidencyError("shared", f"The weights of {parent.name} are being replaced: fork it afterwards.")
        began = time.monotonic()
        new_master = partial(self._new_fork, parent.master, name)
        model = ServedModel((name,), new_master(), new_master)
        try:
            with parent.in_use():  # it must not sleep to make room for what needs its weights
                await self._start(model, patient=False)
        except StartFailed as error:
            await model.master.shutdown(0)
            raise ResidencyError("memory" if model.master.lacked_memory else "gone", str(error)) from error
        except BaseException:
            model.master.kill()
            raise
        self._models.append(model)
        self._by_name[name] = model
        log.info("the model %s is a fork of %s, made in %.1f s", name, parent.name, time.monotonic() - began)
        return model

    def _new_fork(self, parent: LLMMaster, name: str) -> LLMMaster:
        """A master that is yet to be started, whose engines take the weights of the parent's. Raises ResidencyError."""
        settings = parent.settings
        if not settings.kv_cache.enable_vmm_weights:
            raise ResidencyError("unsupported", "Only a model whose weights are in virtual memory can be forked: start "
                                 "it with --enable-vmm-weights.")
        if spans_machines(settings):
            raise ResidencyError("unsupported", "A model on several machines cannot be forked.")
        if parent.weights_directory is None:
            raise ResidencyError("asleep", "The model that would share its weights is not awake: wake it up first.")
        fork = type(parent)(settings.model_copy(update={
            "model": settings.model.model_copy(update={"model_id": name}),
            "lora": settings.lora.model_copy(update={"lora_modules": ()}),  # whose names are the parent's
            "service": settings.service.model_copy(update={"served_model_name": (name,)})}))
        fork.parent = parent
        return fork

    def _on_progress(self, model: ServedModel, progress: EngineProgress) -> None:
        self.on_progress(model, progress)

    def told(self, what: str, model: ServedModel, why: str | None) -> str:
        """A failure as a sentence that names the model where there are several."""
        which = f" ({model.name})" if len(self._models) > 1 else ""
        return f"{what}{which}: {why or 'for no known reason'}"

    async def end_held(self) -> None:
        """Requests of models that are paused or asleep end; those of others go on."""
        await asyncio.gather(*(model.master.end_held() for model in self._models), return_exceptions=True)

    async def shutdown(self, patience: float) -> None:
        """End all engines within `patience` seconds; those that still load hear nothing and are not waited for."""
        for _, fork in self._forks.values():
            fork.cancel()
        await asyncio.gather(*(fork for _, fork in self._forks.values()), return_exceptions=True)
        await asyncio.gather(*(
            model.master.shutdown(patience if model.master.info is not None else 0.0) for model in self._models))
        shutil.rmtree(self._ledgers, ignore_errors=True)

    def kill(self) -> None:
        for master in self._started:
            master.kill()
        shutil.rmtree(self._ledgers, ignore_errors=True)


async def _no_room(model: ServedModel, patient: bool) -> bool:
    return False


async def _unbroken(start: Coroutine[Any, Any, None]) -> None:
    """Cancelled only when it is over: half-started processes would be nobody's."""
    task = asyncio.ensure_future(start)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
