"""A client that leaves takes its request with it: no sequence, no KV block, no file descriptor stays behind.

Every request here would go on for tens of thousands of tokens; that the engine becomes idle long before is the proof.
"""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.server import GAUGES, ServerProcess, poll

pytestmark = pytest.mark.multiprocess

TOKENS = 20000
ENDLESS = {"prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True}
ROUTES = {
    "/v1/completions": ENDLESS,
    "/v1/chat/completions": {**ENDLESS, "messages": [{"role": "user", "content": "Hello"}], "n": 2},
}
ROUTES["/v1/chat/completions"].pop("prompt")


@contextmanager
def aborts(server: ServerProcess, requests: int) -> Iterator[None]:
    """So many requests end in the block, by an abort and well before their last token."""
    before = server.metrics()
    yield
    server.wait_idle()
    poll(lambda: server.metrics()["request_success_total:abort"] - before["request_success_total:abort"] == requests,
         "the aborts in /metrics")
    assert server.metrics()["generation_tokens_total"] - before["generation_tokens_total"] < requests * TOKENS // 2


@pytest.mark.parametrize("path", ROUTES)
def test_while_streaming(server, path):
    body = {**ROUTES[path], "stream": True}
    with aborts(server, 1), server.client() as client, client.stream("POST", path, json=body) as response:
        lines = response.iter_lines()  # kept: the connection closes when it is collected
        assert next(lines).startswith("data: ")
        server.wait_running(body.get("n", 1))
        assert server.metrics()["kv_cache_usage_perc"] > 0
        # leaving the block closes the connection, and then `aborts` looks


@pytest.mark.parametrize("path", ROUTES)
async def test_while_waiting_for_the_whole(server, path):
    async with server.async_client() as client:
        with aborts(server, 1):
            post = asyncio.create_task(client.post(path, json=ROUTES[path]))
            await asyncio.to_thread(server.wait_running, ROUTES[path].get("n", 1))
            post.cancel()
            with pytest.raises(asyncio.CancelledError):
                await post


async def test_during_a_beam_search(server):
    """Each step has new requests in the engine; none comes after the client left."""
    async with server.async_client() as client:
        with aborts(server, 1):
            post = asyncio.create_task(client.post("/v1/completions", json={
                **ENDLESS, "use_beam_search": True, "n": 4}))
            before = server.metrics()["generation_tokens_total"]
            await asyncio.to_thread(
                poll, lambda: server.metrics()["generation_tokens_total"] > before + 20, "some steps")
            post.cancel()
            with pytest.raises(asyncio.CancelledError):
                await post


async def test_during_a_long_prompt(server):
    prompt = "".join(chr(33 + i % 90) for i in range(30000))
    async with server.async_client() as client:
        with aborts(server, 1):
            post = asyncio.create_task(client.post("/v1/completions", json={**ENDLESS, "prompt": prompt}))
            await asyncio.to_thread(server.wait_running, 1)
            post.cancel()
            with pytest.raises(asyncio.CancelledError):
                await post


async def test_while_waiting_for_a_place(server):
    """The cache holds one of them: the other waits, and goes without ever having run."""
    async with server.async_client() as client:
        with aborts(server, 2):
            prompts = [letter * 22000 for letter in "ab"]  # nothing in common
            posts = [asyncio.create_task(client.post("/v1/completions", json={**ENDLESS, "prompt": prompt,
                                                                              "max_tokens": 10000}))
                     for prompt in prompts]
            await asyncio.to_thread(poll, lambda: server.metrics()[GAUGES[1]] == 1, "a waiting request")
            for post in reversed(posts):
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)


def test_fifty_in_a_row_leave_nothing(server):
    def leave(number: int) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({**ENDLESS, "stream": bool(number % 2), "prompt": f"{number} " * 40})
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                               f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
            if number % 4 == 1:
                assert connection.recv(12) == b"HTTP/1.1 200"

    for number in range(8):
        leave(number)
    server.wait_idle()
    before = server.open_files()
    for number in range(50):
        leave(number)
    server.wait_idle()
    poll(lambda: max(a - b for a, b in zip(server.open_files(), before)) <= 0, f"{before} open files again")
