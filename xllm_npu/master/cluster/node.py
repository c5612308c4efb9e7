"""The master's view of one machine that has joined: how to reach it, and the processes it runs for us.

`Node` is a `Launcher` for processes on that machine. Knows the conversation's seal; the socket is the master's.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from xllm_npu.master.cluster.messages import (
    EntryPoint,
    Exited,
    FindPorts,
    Kill,
    MasterMessage,
    Ports,
    Register,
    Start,
    Started,
)

Send = Callable[[MasterMessage], None]


class RemoteChild:
    """A process on another machine. It has ended when its agent says so, or when the agent is lost."""

    def __init__(self, node: str, kill: Callable[[], None]) -> None:
        self._node, self._kill = node, kill
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.last_lines = ""  # of its standard error, once it has ended

    @property
    def where(self) -> str:
        pid = f"pid {self._started.result()} on " if self._started.done() and self._started.result() else ""
        return pid + self._node

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def start(self) -> None:
        """Until it runs. Raises OSError if it cannot be started."""
        if not await self._started:
            raise OSError(f"a process on {self._node} {await self._ended}")

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self.alive:
            self._kill()

    def close(self) -> None:
        """Its standard input belongs to the agent."""

    # What the agent says

    def on_started(self, pid: int) -> None:
        if not self._started.done():
            self._started.set_result(pid)

    def on_end(self, how: str, last_lines: str = "") -> None:
        self.last_lines = last_lines
        if not self._ended.done():
            self._ended.set_result(how)
        self.on_started(0)


class Node:
    """A machine with an agent."""

    def __init__(self, register: Register, send: Send) -> None:
        self.rank, self.address, self.reached = register.node_rank, register.address, register.reached
        self.hostname, self.identity = register.hostname, register.identity
        self.heard = time.monotonic()
        self.lost = False
        self._send = send
        self._numbers = itertools.count()
        self._children: dict[int, RemoteChild] = {}
        self._ports: dict[int, asyncio.Future[list[int]]] = {}

    def __str__(self) -> str:
        return f"node {self.rank} ({self.hostname}, {self.address})"

    async def start(self, entry: EntryPoint, line: bytes) -> RemoteChild:
        """Start a process there; see `Launcher`. Raises OSError."""
        if self.lost:
            raise OSError(f"{self} is gone")
        number = next(self._numbers)
        child = RemoteChild(f"node {self.rank}", lambda: self._send(Kill(number)))
        self._children[number] = child
        self._send(Start(number, entry, line))
        await child.start()
        return child

    async def find_ports(self, count: int) -> list[int]:
        """Free ports at its address. Raises OSError if the machine is lost."""
        if self.lost:
            raise OSError(f"{self} is gone")
        order = next(self._numbers)
        answer = self._ports[order] = asyncio.get_running_loop().create_future()
        self._send(FindPorts(order, count))
        return await answer

    async def wait_idle(self) -> None:
        """Until nothing that was started there runs."""
        while self._children:
            await next(iter(self._children.values())).wait()

    # What the agent says

    def on_started(self, message: Started) -> None:
        if message.child in self._children:
            self._children[message.child].on_started(message.pid)

    def on_exited(self, message: Exited) -> None:
        if message.child in self._children:
            self._children.pop(message.child).on_end(message.how, message.last_lines)

    def on_ports(self, message: Ports) -> None:
        answer = self._ports.pop(message.order, None)
        if answer is not None and not answer.done():
            answer.set_result(message.ports)

    def on_lost(self) -> None:
        self.lost = True
        for child in self._children.values():
            child.on_end("was lost with its machine")
        self._children.clear()
        for answer in self._ports.values():
            if not answer.done():
                answer.set_exception(OSError(f"{self} is gone"))
        self._ports.clear()
