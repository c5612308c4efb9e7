"""The LoRA adapters of one model by name: loading, unloading, and who still uses one that has been unloaded.

Each load gets a number of its own, which requests carry: what was computed with an adapter is found under its number,
so another adapter of the same name never meets it. An adapter that is unloaded has no name at once; requests that are
open go on with it, and when the last has ended the engines forget it. Knows no HTTP; everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from xllm_npu.config.lora import MAX_NAME_CHARS, LoraSettings
from xllm_npu.master.engine_group import CommandFailed, EnginesGone
from xllm_npu.state.messages import EngineCommand, LoadLora, UnloadLora

log = logging.getLogger(__name__)


class AdapterError(ValueError):
    """What was asked cannot be done; the message says why, and `status` is HTTP's."""

    def __init__(self, message: str, param: str, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class AdapterGone(LookupError):
    """The adapter was unloaded before the request that names it began; the message is its name."""


@dataclass(slots=True, eq=False)
class Adapter:
    id: int
    name: str
    path: str
    parent: str | None = None  # the name of its base model, if it was given with one
    uses: int = 0  # requests that are open
    retired: bool = False

    @property
    def directory_name(self) -> str:
        return Path(self.path).name


class Adapters:
    def __init__(self, settings: LoraSettings, command: Callable[[EngineCommand], Awaitable[None]]) -> None:
        """`command` has all engines do something; it raises CommandFailed and EnginesGone."""
        self.settings = settings
        self._command = command
        self._ids = itertools.count(1)
        self._named: dict[str, Adapter] = {}
        self._loaded: dict[int, Adapter] = {}  # retired ones too, until the engines have forgotten them
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False

    @property
    def enabled(self) -> bool:
        return self.settings.enable_lora

    @property
    def listed(self) -> list[Adapter]:
        """Those that requests can name, in the order of their loading."""
        return list(self._named.values())

    def get(self, name: str) -> Adapter | None:
        return self._named.get(name)

    def name_of(self, lora_id: int) -> str:
        adapter = self._loaded.get(lora_id)
        return "" if adapter is None else adapter.name

    @property
    def num_loaded(self) -> int:
        """In the engines' memory."""
        return len(self._loaded)

    # Changes

    async def load_all(self) -> None:
        """Into engines that have just started: those of the settings the first time, later all that have names.

        Raises AdapterError if one of the first ones cannot be served; later that one is dropped. Raises EnginesGone.
        """
        async with self._changing:
            first, self._started = not self._started, True
            if first:
                for module in self.settings.lora_modules if self.enabled else ():
                    try:
                        await self._load(module.name, module.path, module.base_model_name)
                    except CommandFailed as error:
                        raise AdapterError(f"The adapter {module.name} cannot be loaded: {error}", "") from error
                return
            old, self._named, self._loaded = self.listed, {}, {}
            for adapter in old:
                try:
                    await self._load(adapter.name, adapter.path, adapter.parent)
                except CommandFailed as error:
                    log.error("the adapter %s is not served any more: %s", adapter.name, error)
                except EnginesGone:
                    self._named = {one.name: one for one in old}  # for the engines that come next
                    raise

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Raises AdapterError, EnginesGone."""
        if not self.enabled:
            raise AdapterError("This model takes no adapters: start the server with --enable_lora.", "")
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise AdapterError(f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters.", "lora_name")
        if not path or "\0" in path:
            raise AdapterError("lora_path must be a directory on the server.", "lora_path")
        # A client that leaves does not leave half an adapter behind.
        await asyncio.shield(asyncio.ensure_future(self._load_checked(name, path, in_place)))

    async def _load_checked(self, name: str, path: str, in_place: bool) -> None:
        async with self._changing:
            old = self._named.get(name)
            if old is not None and not in_place:
                raise AdapterError(f"An adapter is called {name} already: unload it first, or set load_inplace.",
                                   "lora_name")
            kept = len(self._loaded) - (old is not None)
            if kept >= self.settings.most_loaded:
                raise AdapterError(f"{kept} adapters are loaded, the most that this server holds (--max_cpu_loras): "
                                   "unload one first.", "lora_name")
            try:
                await self._load(name, path, None)
            except CommandFailed as error:
                raise AdapterError(f"The adapter {name} cannot be loaded: {error}", "lora_path") from error

    async def unload(self, name: str) -> None:
        """No request can name it from now on; those that are open go on. Raises AdapterError."""
        async with self._changing:
            adapter = self._named.pop(name, None)
            if adapter is None:
                raise AdapterError(f"There is no adapter called {name}.", "lora_name", 404)
            self._retire(adapter)

    async def _load(self, name: str, path: str, parent: str | None) -> None:
        adapter = Adapter(next(self._ids), name, path, parent)
        try:
            await self._command(LoadLora(adapter.id, path))
        except CommandFailed:
            await self._command(UnloadLora(adapter.id))  # where another engine has it
            raise
        old = self._named.pop(name, None)
        self._named[name] = self._loaded[adapter.id] = adapter
        if old is not None:
            self._retire(old)

    # Requests

    def take(self, lora_id: int) -> None:
        """A request begins to use it. Raises AdapterGone."""
        adapter = self._loaded.get(lora_id)
        if adapter is None or adapter.retired:
            raise AdapterGone("" if adapter is None else adapter.name)
        adapter.uses += 1

    def give(self, lora_id: int) -> None:
        """The request has ended, or its end is on the way to the engine."""
        adapter = self._loaded.get(lora_id)
        if adapter is None:  # of engines that have ended meanwhile
            return
        adapter.uses -= 1
        if adapter.retired:
            self._retire(adapter)

    def _retire(self, adapter: Adapter) -> None:
        adapter.retired = True
        if not adapter.uses:
            task = asyncio.get_running_loop().create_task(self._forget(adapter))  # after what is sent in this turn
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forget(self, adapter: Adapter) -> None:
        try:
            await self._command(UnloadLora(adapter.id))
        except EnginesGone:
            pass
        except CommandFailed as error:
            log.error("the adapter %s stays in memory: %s", adapter.name, error)
            return
        self._loaded.pop(adapter.id, None)

    async def settled(self) -> None:
        """Until what was retired and is not used is forgotten."""
        await asyncio.gather(*self._tasks)
