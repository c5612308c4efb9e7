"""How many connections a listener keeps, over sockets."""

import asyncio
import contextlib
import json
import resource

import pytest

from tests.service.conftest import live_server
from xllm_npu.metrics import render
from xllm_npu.service import connection_limit
from xllm_npu.service.connection_limit import ConnectionLimit

ASK = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(url: str) -> Connection:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer(connection: Connection, ask: bytes = ASK) -> tuple[int, dict[str, str], dict]:
    reader, writer = connection
    writer.write(ask)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(body)


async def serves(url: str) -> bool:
    reader, writer = await connect(url)
    try:
        return (await answer((reader, writer)))[0] == 200
    finally:
        writer.close()
        await reader.read()


async def test_one_too_many_is_told_so(master):
    async with live_server(master, max_connections=2) as server:
        first, second = [await connect(server.url) for _ in range(2)]
        assert (await answer(first))[0] == 200
        for ask in (ASK, b""):
            third = await connect(server.url)
            status, headers, reply = await answer(third, ask)
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert reply["error"]["code"] == "too_many_connections"
            assert "2 connections" in reply["error"]["message"]
            assert await third[0].read() == b""
            third[1].close()
        assert b'reason="max_connections"} 2.0' in render([master.metrics])
        assert (await answer(first))[0] == (await answer(second))[0] == 200  # who was there first stays
        second[1].close()
        async with asyncio.timeout(20):
            while not await serves(server.url):  # until the server has seen the end
                pass
        first[1].close()


async def test_who_was_turned_away_does_not_stay(master, monkeypatch):
    monkeypatch.setattr(connection_limit, "TURNED_AWAY_SECONDS", 0.05)
    async with live_server(master, max_connections=1) as server, asyncio.timeout(20):
        first = await connect(server.url)
        assert (await answer(first))[0] == 200
        reader, writer = await connect(server.url)
        await reader.read()
        with contextlib.suppress(ConnectionError):
            while True:  # it is ended from the other side, which a write shows in the end
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0)
        first[1].close()


async def test_only_so_many_are_half_open(master, monkeypatch):
    monkeypatch.setattr(connection_limit, "MAX_TURNED_AWAY", 1)
    async with live_server(master, max_connections=1) as server:
        first = await connect(server.url)
        assert (await answer(first))[0] == 200
        for _ in range(3):
            assert (await answer(await connect(server.url), b""))[0] == 503
        first[1].close()


@pytest.mark.parametrize(("files", "most", "expected"), [
    (1 << 20, 4096, 4096), (1024, 4096, 768), (300, 4096, 150), (resource.RLIM_INFINITY, 4096, 4096), (1024, 100, 100)])
def test_no_more_than_there_are_files(monkeypatch, files, most, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert ConnectionLimit(most).most == expected
