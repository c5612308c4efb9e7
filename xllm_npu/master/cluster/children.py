"""Processes that an agent starts for the master: only our two entry points, never words from outside.

A child gets one line, in which what belongs to this machine (its copy of the model, a private directory) replaces what
the master wrote, and follows its standard input, so that it ends with the agent. Its standard error is passed on and
its last lines are kept for the report of its end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from xllm_npu.config.settings import Settings, setting_fields
from xllm_npu.execution.socket_directory import socket_parent
from xllm_npu.master.cluster.identity import OWN_SETTINGS
from xllm_npu.master.cluster.messages import EntryPoint, Exited, Start, Started
from xllm_npu.master.launcher import ENTRY_POINTS, ending
from xllm_npu.state.launch import EngineInit, WorkerInit

LAST_LINES, LINE_BYTES = 20, 500  # of standard error, that go into a report
END_SECONDS = 2.0  # for a child to end when its standard input has

Report = Callable[[Started | Exited], None]


def default_commands() -> dict[EntryPoint, Sequence[str]]:
    return {entry: (sys.executable, "-m", module) for entry, module in ENTRY_POINTS.items()}


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    follower: asyncio.Task[None]
    directory: str | None


class Children:
    """`environment` is added to the children's, where the user has not set it."""

    def __init__(self, settings: Settings, report: Report, environment: Mapping[str, str] | None = None,
                 commands: Mapping[EntryPoint, Sequence[str]] | None = None) -> None:
        self._settings, self._report = settings, report
        self._environment = {**(environment or {}), **os.environ}
        self._commands = commands or default_commands()
        self._directory = ""  # for the ledgers of this machine's devices
        self._running: dict[int, _Child] = {}
        self._ended = False

    async def start(self, order: Start) -> None:
        """Reports Started and later Exited; only the latter where it cannot be started."""
        directory = None
        try:
            self._directory = self._directory or tempfile.mkdtemp(prefix="xllm-npu-", dir=socket_parent())
            if order.entry == "engine":
                directory = tempfile.mkdtemp(prefix="xllm-npu-", dir=socket_parent())
            line = localized(order, self._settings, directory, self._directory)
            process = await asyncio.create_subprocess_exec(
                *self._commands[order.entry], stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=self._environment, limit=2**20)
        except (OSError, msgspec.MsgspecError) as error:
            _remove(directory)
            self._report(Exited(order.child, f"could not be started: {error}"))
            return
        self._report(Started(order.child, process.pid))
        follower = asyncio.create_task(self._follow(order.child, process))
        self._running[order.child] = _Child(process, follower, directory)
        if self._ended:
            _kill(process)
        assert process.stdin is not None
        process.stdin.write(line + b"\n")
        with contextlib.suppress(ConnectionError):  # it died already; its report says how
            await process.stdin.drain()

    def kill(self, child: int) -> None:
        if child in self._running:
            _kill(self._running[child].process)

    async def end(self, gentle: bool) -> None:
        """All of them, by closing their standard input if `gentle`, then by force. Reports nothing."""
        self._ended, self._report = True, lambda _: None
        followers = [child.follower for child in self._running.values()]
        if gentle and followers:
            for child in self._running.values():
                assert child.process.stdin is not None
                child.process.stdin.close()
            await asyncio.wait(followers, timeout=END_SECONDS)
        self.kill_all()
        if followers:
            await asyncio.wait(followers, timeout=END_SECONDS)

    def kill_all(self) -> None:
        self._ended = True
        for child in self._running.values():
            _kill(child.process)
        _remove(self._directory)

    async def _follow(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Until it has ended: its grandchildren may hold its standard error for longer."""
        tail: collections.deque[bytes] = collections.deque(maxlen=LAST_LINES)
        reader = asyncio.create_task(_pass_on(process.stderr, tail))
        code = await process.wait()
        await asyncio.wait([reader], timeout=0.2)
        reader.cancel()
        child = self._running.pop(number, None)
        if child is not None:
            _remove(child.directory)
        self._report(Exited(number, ending(code), b"\n".join(tail).decode(errors="replace")))


async def _pass_on(stream: asyncio.StreamReader | None, tail: collections.deque[bytes]) -> None:
    assert stream is not None
    while line := await _next_line(stream):
        tail.append(line.rstrip()[:LINE_BYTES])
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """A line, or a piece of one that is absurdly long; empty at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(max(error.consumed, 1))


def localized(order: Start, settings: Settings, directory: str | None, shared: str) -> bytes:
    """The child's line with this machine's own settings, and directories: the child's own and that of all children.

    Raises MsgspecError if it is no such line.
    """
    if order.entry == "engine":
        engine = msgspec.json.decode(order.line, type=EngineInit)
        engine.settings, engine.directory = _with_own(engine.settings, settings), directory or ""
        engine.ledgers = shared
        return msgspec.json.encode(engine)
    worker = msgspec.json.decode(order.line, type=WorkerInit)
    worker.settings, worker.ring = _with_own(worker.settings, settings), None
    worker.ledgers = worker.directory = shared
    return msgspec.json.encode(worker)


def _with_own(text: str, settings: Settings) -> str:
    given = json.loads(text)
    for name in OWN_SETTINGS:
        section = setting_fields()[name].section
        own = getattr(settings, section)
        values = given.setdefault(section, {})
        values.pop(name, None)
        # The device is that of the child's slot.
        if name in own.model_fields_set and name != "device_id":
            values[name] = getattr(own, name)
    return json.dumps(given)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _remove(directory: str | None) -> None:
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
