"""The HTTP process's end of one engine process: has it started, talks to it, notices when it dies.

Everything runs on the event loop. The engine process ends with this one, because its standard input does. Knows
nothing of the other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from xllm_npu.master.launcher import Child, Launcher
from xllm_npu.state.launch import EngineInit
from xllm_npu.state.messages import ClientMessage, EngineFailed, EngineMessage, Shutdown

log = logging.getLogger(__name__)

ENGINE = "engine process"
TURN_SECONDS = 0.002  # that messages are handled for before others have their turn
Context = zmq.Context[zmq.Socket[bytes]]


class Clue(enum.IntEnum):
    """How much an ending says of its cause: the smaller, the more, where several processes end together."""

    DIED = 0  # without a word
    SAID = 1  # what happened
    FAILED = 2  # with an exception that may come from another's end


@dataclass(slots=True, frozen=True)
class Ending:
    clue: Clue
    reason: str  # a sentence for people
    lacked_memory: bool = False  # as EngineFailed has it


OnMessage = Callable[[EngineMessage], None]
OnExit = Callable[[Ending], None]


class EngineClient:
    """`on_message` hears everything the engine says; `on_exit` hears once how it ended, if nobody asked it to."""

    def __init__(
        self, launcher: Launcher, init: EngineInit, on_message: OnMessage, on_exit: OnExit,
        name: str = ENGINE,
    ) -> None:
        self._launcher, self._init, self._name = launcher, init, name
        self._on_message, self._on_exit = on_message, on_exit
        self._context: Context | None = None
        self._child: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._failure: EngineFailed | None = None
        self._stopping = False

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def launch(self) -> None:
        """Start the process; returns before the model is loaded. Raises OSError if it cannot be started."""
        self._child = await self._launcher.start("engine", msgspec.json.encode(self._init))

    def listen(self) -> None:
        """Open the sockets, which may come after the process, and watch both. Raises zmq.ZMQError."""
        assert self._child is not None
        self._context = zmq.Context()
        self._outgoing = self._context.socket(zmq.PUSH)
        self._incoming = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        for socket, endpoint in ((self._outgoing, self._init.requests), (self._incoming, self._init.outputs)):
            socket.set_hwm(0)  # what waits is bounded by the requests that are open
            socket.set(zmq.IPV6, 1)
            socket.bind(endpoint)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(self._child))]

    def send(self, message: ClientMessage) -> None:
        """Never blocks."""
        if self._context is not None and not self._outgoing.closed:
            with contextlib.suppress(zmq.Again):  # no engine has connected: there is nobody to tell
                self._outgoing.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        clock = asyncio.get_running_loop().time
        yielded = clock()
        try:
            while True:
                message = self._decoder.decode(await self._incoming.recv())
                if isinstance(message, EngineFailed):
                    self._failure = message
                self._on_message(message)
                if clock() - yielded >= TURN_SECONDS:
                    # While more is there `recv` does not yield, and nothing else of this process would run.
                    await asyncio.sleep(0)
                    yielded = clock()
        except Exception as error:  # without it nobody would hear anything again, and nobody would know why
            log.exception("the engine's messages cannot be handled")
            self._on_exit(Ending(Clue.SAID, f"The engine's messages cannot be handled: {type(error).__name__}."))

    async def _watch(self, child: Child) -> None:
        how = await child.wait()
        if self._stopping:
            return
        await self._last_words()
        self._on_exit(self._ending(child, how))

    def _ending(self, child: Child, how: str) -> Ending:
        if self._failure is None:
            return Ending(Clue.DIED, f"The {self._name} ({child.where}) {how}.")
        message = self._failure.message
        if self._failure.ours:
            return Ending(Clue.SAID, message, self._failure.lacked_memory)
        several = self._name != ENGINE
        return Ending(Clue.FAILED, f"The {self._name} ({child.where}) failed: {message}" if several else message)

    async def _last_words(self) -> None:
        """What it sent before it died may still be on its way."""
        for _ in range(20):
            if self._failure is not None or not await self._incoming.poll(50):
                return
            await asyncio.sleep(0)

    async def stop(self, patience: float) -> None:
        """Ask it to end, wait, and make sure. Nothing of it is left afterwards."""
        self._stopping = True
        if self._child is not None:
            if self._child.alive:
                self.send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._child.wait(), patience)
            self._child.kill()
            await self._child.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close()

    def kill(self) -> None:
        """At once, without waiting."""
        self._stopping = True
        if self._child is not None:
            self._child.kill()

    def _close(self) -> None:
        if self._context is not None:
            self._outgoing.close(linger=0)
            self._incoming.close(linger=0)
            self._context.term()  # waits for open sockets, of which there are none
            self._context = None
        if self._child is not None:
            self._child.close()
