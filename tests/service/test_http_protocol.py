import asyncio
import json

import pytest

from tests.service.conftest import live_server
from xllm_npu.service.http_protocol import MAX_HEAD_BYTES

BEGIN = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = BEGIN + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


async def answer(url: str, *pieces: bytes) -> tuple[int, dict]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))
    finally:
        writer.close()


@pytest.mark.parametrize("endless", [
    (BEGIN + b"X: ", b"a" * 4096), (BEGIN, b"X-A: b\r\n" * 512), (CHUNKED + b"0\r\nX: ", b"a" * 4096),
    (CHUNKED + b"1;", b"a" * 4096)])
async def test_endless_headers_are_cut_off(master, endless):
    async with live_server(master) as server:
        first, more = endless
        status, reply = await answer(server.url, first, more * (3 * MAX_HEAD_BYTES // len(more)))
    assert (status, reply["error"]["code"]) == (431, "headers_too_large")


async def test_large_bodies_are_no_headers(master):
    body = json.dumps({"prompt": "a", "user": "x" * 3 * MAX_HEAD_BYTES}).encode()
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in body)  # framing alone exceeds the limit
    async with live_server(master) as server:
        assert (await answer(server.url, CHUNKED, small, b"0\r\n\r\n"))[0] == 200


async def test_what_is_not_http_gets_the_envelope(master):
    async with live_server(master) as server:
        status, reply = await answer(server.url, b"hello there\r\n\r\n")
    assert (status, reply["error"]["code"]) == (400, "invalid_http")


async def test_an_announced_body_is_refused_unread(master):
    async with live_server(master, max_body_bytes=1024) as server:
        status, reply = await answer(server.url, BEGIN + b"Content-Length: 9999999\r\n\r\n")
    assert (status, reply["error"]["code"]) == (413, "request_too_large")
