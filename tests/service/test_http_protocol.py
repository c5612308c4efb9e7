import asyncio
import json

import pytest

from tests.service.conftest import live_server
from tests.service.fake_master import output, says_then_waits
from xllm_npu.service import http_protocol
from xllm_npu.service.http_protocol import MAX_HEAD_BYTES
from xllm_npu.state.output import SequenceDelta

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


async def test_what_is_not_http_gets_the_envelope_and_no_line_in_the_log(master, caplog):
    async with live_server(master) as server:
        status, reply = await answer(server.url, b"hello there\r\n\r\n")
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        await answer(server.url, b"GET /version HTTP/1.1\r\nHost: x\r\n" + upgrade)
    assert (status, reply["error"]["code"]) == (400, "invalid_http")
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_an_announced_body_is_refused_unread(master):
    async with live_server(master, max_body_bytes=1024) as server:
        status, reply = await answer(server.url, BEGIN + b"Content-Length: 9999999\r\n\r\n")
    assert (status, reply["error"]["code"]) == (413, "request_too_large")


def post(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return BEGIN + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data


async def connection(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("part", [
    BEGIN, BEGIN + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{", CHUNKED + b"1\r\n{\r\n"])
async def test_who_stops_in_a_request_loses_the_connection(master, monkeypatch, part):
    monkeypatch.setattr(http_protocol, "PATIENCE_SECONDS", 0.1)
    async with live_server(master) as server:
        status, reply = await answer(server.url, part)
        assert (status, reply["error"]["code"]) == (408, "request_timeout")
        await server.admission.idle.wait()


@pytest.mark.parametrize("before", [[], [post({"prompt": "a"}), b"\r\n"]])
async def test_who_begins_no_request_loses_the_connection(master, monkeypatch, before):
    monkeypatch.setattr(http_protocol, "PATIENCE_SECONDS", 0.1)
    async with live_server(master) as server:
        reader, writer = await connection(server.url)
        for piece in before:
            writer.write(piece)
            if piece.strip():
                await reader.readuntil(b"}")
        await reader.read()
        writer.close()


async def test_a_body_that_keeps_coming_may_take_its_time(master, monkeypatch):
    monkeypatch.setattr(http_protocol, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(http_protocol, "PATIENCE_BYTES", 1000)
    async with live_server(master) as server:
        reader, writer = await connection(server.url)
        data = json.dumps({"prompt": "a", "user": "x" * 12_000}).encode()
        writer.write(BEGIN + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data))
        for start in range(0, len(data), 2000):  # 0.7 s in all
            await asyncio.sleep(0.1)
            writer.write(data[start : start + 2000])
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_who_takes_no_answer_loses_the_connection(master, monkeypatch):
    monkeypatch.setattr(http_protocol, "PATIENCE_SECONDS", 0.1)

    async def script(request):
        while True:
            yield output(request, SequenceDelta(0, "x" * 10_000, [1]))

    master.script = script
    async with live_server(master) as server:
        _, writer = await connection(server.url)
        writer.write(post({"prompt": "a", "stream": True}))
        await master.aborted_one.wait()
        await server.admission.idle.wait()
        writer.close()


async def test_leaving_is_noticed_behind_a_pipelined_request(master):
    master.script = says_then_waits("x", asyncio.Event())
    async with live_server(master) as server:
        _, writer = await connection(server.url)
        writer.write(post({"prompt": "a"}) + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await master.submitted_one.wait()
        writer.close()
        await master.aborted_one.wait()
        await server.admission.idle.wait()


async def test_nonsense_in_mid_stream_ends_the_stream(master):
    master.script = says_then_waits("x", asyncio.Event())
    async with live_server(master) as server:
        reader, writer = await connection(server.url)
        writer.write(post({"prompt": "a", "stream": True}))
        begun = await reader.readuntil(b"data: ")
        writer.write(b"nonsense\r\n\r\n")
        whole = begun + await reader.read()
        assert whole.count(b"HTTP/1.1 ") == 1
        assert not whole.endswith(b"0\r\n\r\n")
        await master.aborted_one.wait()
        await server.admission.idle.wait()
        writer.close()
