"""Starting engine and worker processes: the verbs, and how this machine does them.

A child gets one line on its standard input, which then stays open for as long as its parent lives; when it ends, the
child ends. Only the entry points named here are ever started. Another machine is another `Launcher`. Everything runs
on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import Literal, Protocol

EntryPoint = Literal["engine", "worker"]
ENTRY_POINTS: dict[EntryPoint, str] = {
    "engine": "xllm_npu.master.engine_process",
    "worker": "xllm_npu.execution.worker_process",
}


class Child(Protocol):
    """A process that was started."""

    @property
    def where(self) -> str:
        """For people: "pid 7", with the machine's name where that is another one."""
        ...

    @property
    def alive(self) -> bool: ...

    async def wait(self) -> str:
        """Until it has ended; how it did: "ended with exit code 1", "was ended by SIGKILL"."""
        ...

    def kill(self) -> None:
        """At once. Harmless for one that has ended."""
        ...

    def close(self) -> None:
        """Give back what this side holds of it."""
        ...


class Launcher(Protocol):
    async def start(self, entry: EntryPoint, line: bytes) -> Child:
        """Start a process and hand it `line`, which has no newline. Raises OSError if it cannot be started."""
        ...


class LocalChild:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def where(self) -> str:
        return f"pid {self._process.pid}"

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> str:
        return ending(await self._process.wait())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


class LocalLauncher:
    """Children of this process."""

    async def start(self, entry: EntryPoint, line: bytes) -> LocalChild:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", ENTRY_POINTS[entry], stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # it died already (uvloop: a closed transport):
            process.stdin.write(line + b"\n")  # `wait` says how
            await process.stdin.drain()
        return LocalChild(process)


def ending(code: int) -> str:
    """What a return code of a child means, as `Child.wait` says it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-code}"
