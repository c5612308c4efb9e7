"""The HTTP process's end of the engine process: starts it, talks to it, notices when it dies.

Everything runs on the event loop. The sockets lie in a directory that only this user can enter; it goes when the
engine goes. The engine process ends with this one, because its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from xllm_npu.config.settings import Settings
from xllm_npu.state.messages import ClientMessage, EngineFailed, EngineMessage, Shutdown

log = logging.getLogger(__name__)

OnMessage = Callable[[EngineMessage], None]
OnExit = Callable[[str], None]


class EngineClient:
    """`on_message` hears everything the engine says; `on_exit` hears once how it ended, if nobody asked it to."""

    def __init__(self, settings: Settings, on_message: OnMessage, on_exit: OnExit) -> None:
        self._settings = settings
        self._on_message, self._on_exit = on_message, on_exit
        self._directory: Path | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._failure: EngineFailed | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; returns before the model is loaded."""
        self._directory = Path(tempfile.mkdtemp(prefix="xllm-npu-"))  # mode 700
        self._context = zmq.Context()
        self._outgoing = self._context.socket(zmq.PUSH)
        self._incoming = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        self._outgoing.set_hwm(0)
        self._incoming.set_hwm(0)
        self._outgoing.bind(f"ipc://{self._directory}/requests")
        self._incoming.bind(f"ipc://{self._directory}/outputs")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "xllm_npu.master.engine_process", str(self._directory), stdin=asyncio.subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(self._settings.model_dump_json(exclude_unset=True).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died already; the watcher says how
            await self._process.stdin.drain()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    def send(self, message: ClientMessage) -> None:
        """Never blocks: what waits in the socket is bounded by the requests that are open."""
        if self._context is not None and not self._outgoing.closed:
            with contextlib.suppress(zmq.Again):  # no engine has connected: there is nobody to tell
                self._outgoing.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        try:
            while True:
                message = self._decoder.decode(await self._incoming.recv())
                if isinstance(message, EngineFailed):
                    self._failure = message
                self._on_message(message)
        except Exception as error:  # without it nobody would hear anything again, and nobody would know why
            log.exception("the engine's messages cannot be handled")
            self._on_exit(f"The engine's messages cannot be handled: {type(error).__name__}.")

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if self._stopping:
            return
        await self._last_words()
        if self._failure is not None:
            reason = self._failure.message
        elif code < 0:
            reason = f"The engine process (pid {self.pid}) was ended by {signal.Signals(-code).name}."
        else:
            reason = f"The engine process (pid {self.pid}) ended with exit code {code}."
        self._on_exit(reason)

    async def _last_words(self) -> None:
        """What it sent before it died may still be on its way."""
        for _ in range(20):
            if self._failure is not None or not await self._incoming.poll(50):
                return
            await asyncio.sleep(0)

    async def stop(self, patience: float) -> None:
        """Ask it to end, wait, and make sure. Nothing of it is left afterwards."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            self.send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), patience)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._clean_up()

    def kill(self) -> None:
        """At once, without waiting; for a second Ctrl-C."""
        self._stopping = True
        if self.alive and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._remove_directory()

    def _clean_up(self) -> None:
        if self._context is not None:
            self._outgoing.close(linger=0)
            self._incoming.close(linger=0)
            self._context.term()  # waits for open sockets, of which there are none
            self._context = None
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
