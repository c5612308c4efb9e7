"""Either process dies by SIGKILL: whoever is left says so, ends, and leaves nothing behind."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.server import ServerProcess, poll

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "Hello", "max_tokens": 30000, "ignore_eos": True}


@pytest.fixture
def server(tiny_dir: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """One for each test, that has just been started."""
    with ServerProcess(tiny_dir, tmp_path, ready=False) as server:
        yield server


def kill(pid: int) -> None:
    psutil.Process(pid).send_signal(signal.SIGKILL)


def last_words(server: ServerProcess, engine_pid: int, what: str) -> None:
    """It exits with a failure and one sentence that names the process and its end."""
    assert server.wait() == 1
    sentence = f"{what}: The engine process (pid {engine_pid}) was ended by SIGKILL."
    assert server.stderr.splitlines()[-1] == f"xllm-npu: {sentence}"
    assert server.stderr.count("SIGKILL") == 1
    server.assert_nothing_left()


@pytest.mark.slow
def test_engine_dies_while_loading(server):
    engine = server.engine_pid
    assert server.running
    kill(engine)
    last_words(server, engine, "Cannot start")


def test_engine_dies_with_requests_in_flight(server):
    server.wait_ready()
    engine = server.engine_pid
    with server.client() as client, ThreadPoolExecutor() as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=ENDLESS)
        server.wait_running(1)
        with client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
            lines = response.iter_lines()
            assert '"text"' in next(lines)
            server.wait_running(2)
            kill(engine)
            health = poll(lambda: (answer := client.get("/health")).status_code != 200 and answer, "a sick server")
            refused = client.post(COMPLETIONS, json=ENDLESS)
            frames = [line for line in lines if line]
        body = whole.result()
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert body.status_code in (500, 503)
    for error in (body.json()["error"], json.loads(frames[-1].removeprefix("data: "))["error"]):
        assert re.search(rf"engine process \(pid {engine}\) was ended by SIGKILL", error["message"])
        assert error["type"] == "server_error"
    assert "data: [DONE]" not in frames
    last_words(server, engine, "The engine stopped")


def orphaned(server: ServerProcess) -> None:
    """The HTTP process has been killed: the engine process sees it, whatever it is doing, and cleans up."""
    assert server.wait() == -signal.SIGKILL
    server.assert_nothing_left()


@pytest.mark.slow
def test_http_process_dies_idle(server):
    server.wait_ready()
    assert psutil.pid_exists(server.engine_pid)
    assert len(server.socket_directories()) == 2  # the other has ledgers
    kill(server.pid)
    orphaned(server)


def test_http_process_dies_while_its_engine_decodes(server):
    server.wait_ready()
    with server.client() as client, client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        server.wait_running(1)
        kill(server.pid)
        with pytest.raises(httpx.TransportError):
            list(lines)
    orphaned(server)
