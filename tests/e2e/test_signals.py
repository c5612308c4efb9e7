"""SIGTERM lets requests finish, for a time; Ctrl-C twice does not."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.server import ServerProcess, poll

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True}
ENDLESS = {**LONG, "max_tokens": 30000}


@pytest.fixture
def server(request: pytest.FixtureRequest, tiny_dir: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """One for each test, that has just been started."""
    with ServerProcess(tiny_dir, tmp_path, *getattr(request, "param", ()), ready=False) as server:
        yield server


def wait_draining(client: httpx.Client) -> None:
    poll(lambda: client.get("/health").status_code == 503, "the server to drain")
    refused = client.post(COMPLETIONS, json=LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.slow
def test_while_loading(server):
    assert server.engine_pid
    assert server.stop() == 0
    server.assert_nothing_left()


def test_requests_in_flight_finish(server):
    server.wait_ready()
    with server.client() as client, ThreadPoolExecutor() as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=LONG)
        server.wait_running(1)
        with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.send(signal.SIGTERM)
            wait_draining(client)
            frames = [line for line in lines if line]
        assert frames[-1] == "data: [DONE]"
        assert json.loads(frames[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert whole.result().json()["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert server.wait() == 0
    server.assert_nothing_left()


@pytest.mark.parametrize("server", [("--shutdown-timeout", "1")], indirect=True)
def test_requests_that_do_not_finish_are_ended(server):
    server.wait_ready()
    with server.client() as client, ThreadPoolExecutor() as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=ENDLESS)
        server.wait_running(1)
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.send(signal.SIGTERM)
            frames = [line for line in lines if line]
        assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "shutting_down")
    assert server.wait() == 0
    assert "2 requests did not finish in time" in server.stderr
    server.assert_nothing_left()


@pytest.mark.slow
def test_second_interrupt_is_immediate(server):
    server.wait_ready()
    with server.client() as client, client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        server.send(signal.SIGINT)
        wait_draining(client)
        server.send(signal.SIGINT)
        with pytest.raises(httpx.TransportError):
            list(lines)
    assert server.wait() == 130
    server.assert_nothing_left()
