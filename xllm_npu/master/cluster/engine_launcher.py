"""Starting an engine whose workers are spread over machines: the engine, and beside it those that it cannot start.

An engine starts the workers of its own machine itself; the others are started through the agents of theirs, connect to
the engine, and are ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from xllm_npu.master.cluster.node import Node, RemoteChild
from xllm_npu.master.launcher import Child, EntryPoint, Launcher
from xllm_npu.state.launch import WorkerInit

log = logging.getLogger(__name__)

# For an engine to say itself what a worker that failed has told it, before only its end is known.
ENGINE_SPEAKS_SECONDS = 1.5
ASKED_TO_END = "ended with exit code 0"


@dataclass(frozen=True, slots=True)
class FarWorker:
    """A worker on another machine than its engine."""

    rank: int  # in the world
    node: Node
    init: WorkerInit


class EngineLauncher:
    """`on_failure` hears of a worker that ends while its engine runs."""

    def __init__(self, launcher: Launcher, workers: Sequence[FarWorker], on_failure: Callable[[str], None]) -> None:
        self._launcher, self._workers, self._on_failure = launcher, workers, on_failure

    async def start(self, entry: EntryPoint, line: bytes) -> EngineChild:
        engine = EngineChild(await self._launcher.start(entry, line), self._on_failure)
        try:
            for worker in self._workers:
                engine.add(worker.rank, await worker.node.start("worker", msgspec.json.encode(worker.init)))
        except OSError:
            engine.kill()
            raise
        return engine


class EngineChild:
    """An engine and its far workers, seen as one child: it lives and ends as the engine does."""

    def __init__(self, engine: Child, on_failure: Callable[[str], None]) -> None:
        self._engine, self._on_failure = engine, on_failure
        self._workers: list[RemoteChild] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._killed = False

    def add(self, rank: int, worker: RemoteChild) -> None:
        self._workers.append(worker)
        self._watchers.append(asyncio.create_task(self._watch(rank, worker)))

    @property
    def where(self) -> str:
        return self._engine.where

    @property
    def alive(self) -> bool:
        return self._engine.alive

    async def wait(self) -> str:
        return await self._engine.wait()

    def kill(self) -> None:
        """The workers too, which do not notice the end of their engine."""
        self._killed = True
        self._engine.kill()
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        self._engine.close()

    async def _watch(self, rank: int, worker: RemoteChild) -> None:
        how = await worker.wait()
        if how == ASKED_TO_END or self._killed:
            return
        if how.startswith("ended"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.wait(), ENGINE_SPEAKS_SECONDS)
        if self._engine.alive and not self._killed:
            if worker.last_lines:
                log.error("the last words of rank %d:\n%s", rank, worker.last_lines)
            self._on_failure(f"The worker process of rank {rank} ({worker.where}) {how}.")
