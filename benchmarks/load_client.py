"""A streaming load client for OpenAI-compatible servers that costs little: raw HTTP/1.1 over asyncio streams.

It keeps connections alive, reads chunked SSE by lines and notes when each piece of text arrived. It knows no
workloads and no statistics: `drive` sends given prompts, closed loop (a fixed number in flight) or open loop (at
given times), and returns one `Record` a request, failed ones included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """One request. Times are time.perf_counter() seconds."""

    due: float  # when it should have been sent; latencies count from here
    sent: float = 0.0
    events: list[float] = field(default_factory=list)  # arrival of each piece of text
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Connection:
    """One kept-alive connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise SystemExit(f"--url must look like http://host:port, got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()
        self._streams = None

    async def request(
        self, method: str, path: str, body: bytes = b"", key: str = ""
    ) -> tuple[int, AsyncIterator[bytes]]:
        """Status and the body's pieces as they arrive; read them to the end before the next request."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            + (f"Authorization: Bearer {key}\r\n" if key else "")
            + f"Content-Length: {len(body)}\r\n\r\n"
        )
        answer = await self._send(head.encode() + body)
        lines = answer.split(b"\r\n")
        headers = {k.strip().lower(): v.strip().lower() for k, _, v in (x.partition(b":") for x in lines[1:])}
        return int(lines[0].split()[1]), self._body(headers)

    async def _send(self, message: bytes) -> bytes:
        """Returns the answer's head. A kept-alive connection may have been closed meanwhile: then once more."""
        if self._streams:
            try:
                return await self._exchange(message)
            except (asyncio.IncompleteReadError, ConnectionError):
                self.close()
        self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        return await self._exchange(message)

    async def _exchange(self, message: bytes) -> bytes:
        assert self._streams
        reader, writer = self._streams
        writer.write(message)
        await writer.drain()
        return await reader.readuntil(b"\r\n\r\n")

    async def _body(self, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
        assert self._streams
        reader = self._streams[0]
        if headers.get(b"transfer-encoding") == b"chunked":
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        elif b"content-length" in headers:
            yield await reader.readexactly(int(headers[b"content-length"]))
        else:
            while data := await reader.read(65536):
                yield data
            self.close()
        if headers.get(b"connection") == b"close":
            self.close()


@dataclass(slots=True, frozen=True)
class Target:
    url: str
    model: str
    api_key: str = ""
    timeout_s: float = 600.0  # of one request


def completion_body(model: str, prompt: str, output_len: int) -> bytes:
    """Greedy, of a fixed length whatever the model would like, so that every server does the same work."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def get_json(url: str, path: str, key: str = "") -> object:
    """Raises OSError if there is no server, ValueError if it does not answer 200 with JSON."""
    connection = Connection(url)
    try:
        status, body = await connection.request("GET", path, key=key)
        raw = b"".join([piece async for piece in body])
    finally:
        connection.close()
    if status != 200:
        raise ValueError(f"GET {path} answered {status}")
    return msgspec.json.decode(raw) if raw.strip() else None


async def _complete(connection: Connection, target: Target, body: bytes, record: Record) -> None:
    record.sent = time.perf_counter()
    status, pieces = await connection.request("POST", "/v1/completions", body, target.api_key)
    rest = b""
    async for piece in pieces:
        now = time.perf_counter()
        if status != 200:
            rest += piece
            continue
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                _note(record, line[5:].strip(), now)
    record.ended = time.perf_counter()
    if status != 200:
        record.error = f"{status} {rest[:300].decode(errors='replace')}"
    elif not record.error and not record.output_tokens:
        record.error = "the stream ended without usage"


def _note(record: Record, data: bytes, now: float) -> None:
    if data == b"[DONE]":
        return
    chunk = _decode_chunk(data)
    # A token that completes no character comes as "" and is an event too; a last chunk with a reason only is not.
    if chunk.choices and (chunk.choices[0].text or not chunk.choices[0].finish_reason):
        record.events.append(now)
    if chunk.usage:
        record.prompt_tokens = chunk.usage.prompt_tokens
        record.output_tokens = chunk.usage.completion_tokens
    if bytes(chunk.error) not in (b"", b"null"):
        record.error = bytes(chunk.error)[:300].decode(errors="replace")


async def _one(connection: Connection, target: Target, body: bytes, record: Record) -> None:
    try:
        async with asyncio.timeout(target.timeout_s):
            await _complete(connection, target, body, record)
    except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError, msgspec.DecodeError) as error:
        connection.close()
        record.error = f"{type(error).__name__}: {error}"


async def drive_closed(target: Target, bodies: Sequence[bytes], concurrency: int) -> list[Record]:
    """`concurrency` requests in flight until all are done."""
    todo = list(reversed(bodies))
    records: list[Record] = []

    async def client() -> None:
        connection = Connection(target.url)
        while todo:
            body = todo.pop()
            record = Record(due=time.perf_counter())
            records.append(record)
            await _one(connection, target, body, record)
        connection.close()

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(bodies)))))
    return records


async def drive_open(target: Target, bodies: Sequence[bytes], offsets: Sequence[float]) -> list[Record]:
    """Each request at its offset (seconds from now), however many are in flight."""
    start = time.perf_counter()
    idle: list[Connection] = []

    async def client(body: bytes, offset: float) -> Record:
        record = Record(due=start + offset)
        await asyncio.sleep(max(0.0, record.due - time.perf_counter()))
        connection = idle.pop() if idle else Connection(target.url)
        await _one(connection, target, body, record)
        idle.append(connection)
        return record

    records = await asyncio.gather(*(client(b, t) for b, t in zip(bodies, offsets, strict=True)))
    for connection in idle:
        connection.close()
    return records
