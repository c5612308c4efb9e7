"""The HTTP process's end of the Ray driver: has agents started in a Ray cluster, and sees to it that they go again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from xllm_npu.config.settings import Settings
from xllm_npu.master.cluster.cluster_master import ClusterError
from xllm_npu.master.cluster.ray_driver import Connect, Connected, Failed, Order, Place, Placed, Report, Waiting
from xllm_npu.master.launcher import ending

log = logging.getLogger(__name__)

CLOSE_SECONDS = 15.0  # for Ray to take actors and placement group back
T = TypeVar("T", bound=Report)


class RayPlacement:
    """`on_failure` hears, after `place`, of an actor or a driver that ended."""

    def __init__(self, settings: Settings, on_failure: Callable[[str], None]) -> None:
        self._settings, self._on_failure = settings, on_failure
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)

    async def connect(self) -> Connected:
        """Find the Ray cluster. Raises ClusterError."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "xllm_npu.master.cluster.ray_driver", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, start_new_session=True)  # Ctrl-C is this process's to handle
        self._order(Connect(self._settings.execution.platform))
        return await self._expect(Connected)

    async def place(self, master: str, count: int) -> None:
        """Have `count` agents started that join the master at host:port. Raises ClusterError."""
        d = self._settings.distributed
        self._order(Place(
            settings=self._settings.model_dump_json(exclude_unset=True), secret=d.cluster_secret or "", master=master,
            count=count, cores=max(1, self._settings.execution.num_threads), timeout=d.node_join_timeout))
        await self._expect(Placed)
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Actors and placement group go; those that still run are killed."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), CLOSE_SECONDS)
        if process.returncode is None:
            log.warning("Ray does not let go of its placement group in time")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _order(self, order: Order) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def _expect(self, kind: type[T]) -> T:
        while True:
            report = await self._next()
            if isinstance(report, kind):
                return report
            if isinstance(report, Failed):
                raise ClusterError(report.message)
            if isinstance(report, Waiting):
                log.info("waiting for Ray: %s", report.message)

    async def _next(self) -> Report:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            how = ending(await self._process.wait())
            return Failed(f"The Ray driver process (pid {self._process.pid}) {how}.")
        return self._decoder.decode(line)

    async def _watch(self) -> None:
        while True:
            report = await self._next()
            if isinstance(report, Failed):
                self._on_failure(report.message)
                return
