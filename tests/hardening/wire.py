"""One connection as bytes: how a request is written, and what comes back, whole or not.

A client like this may do what no library lets one do: stop in mid-body, read a byte at a time, reset the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
SECONDS = 120.0  # a request that is not over by then hangs
PAUSE = 0.004  # of slow clients


@dataclass
class Exchange:
    """What is written, in pieces, and when this client has had enough."""

    pieces: Sequence[bytes]
    pause: float = 0.0  # after each piece
    read: int | None = None  # bytes after which it leaves; None: it reads to the end, 0: it reads nothing
    slow: bool = False  # it reads a few bytes at a time
    reset: bool = False  # it leaves with RST
    half_close: bool = False  # it says that it writes no more
    answer: bytearray = field(default_factory=bytearray)

    async def run(self, host: str, port: int) -> None:
        """Errors of the connection are the server's right; TimeoutError where it hangs."""
        async with asyncio.timeout(SECONDS):
            sock = socket.socket()
            if self.slow:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
            try:
                with contextlib.suppress(OSError):
                    reading = asyncio.ensure_future(self._read(reader))
                    try:
                        await self._write(writer)
                        await reading
                    finally:
                        reading.cancel()
            finally:
                if self.reset and sock.fileno() >= 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.close()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                if self.pause:
                    await asyncio.sleep(self.pause)
            if self.half_close and writer.can_write_eof():
                writer.write_eof()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while self.read is None or len(self.answer) < self.read:
                data = await reader.read(64 if self.slow else 2**16)
                if not data:
                    return
                self.answer += data
                if self.slow:
                    await asyncio.sleep(PAUSE)

    @property
    def statuses(self) -> list[int]:
        """Of the answers in it; a body that holds a status line counts too."""
        return [int(status) for status in STATUS.findall(bytes(self.answer))]
