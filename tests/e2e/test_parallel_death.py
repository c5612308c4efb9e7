"""A process of a server with several ranks dies, or stands still: at any moment the others notice within two seconds,
requests in flight end with an error, the server exits and names who died, and nothing is left.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.server import ENGINE, WORKER, ServerProcess, poll

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "Hello", "max_tokens": 30000, "ignore_eos": True}
LONG = {"prompt": "x" * 30000, "max_tokens": 5}
TENSOR = ("--tp-size", "2", "--max-model-len", "32000", "--max-tokens-per-batch", "64")
NOTICE_SECONDS = 2.0  # from the signal to the error that a client hears
EXIT_SECONDS = 10.0


def kill(pid: int) -> float:
    psutil.Process(pid).send_signal(signal.SIGKILL)
    return time.monotonic()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def victim(server: ServerProcess, who: str) -> tuple[int, str]:
    """(its process id, what the last words must name)"""
    if who == "worker":
        pid = server.children_of_kind(WORKER, 1)[0]
        return pid, f"The worker process of rank 1 (pid {pid}) was ended by SIGKILL."
    pid = server.engine_pid
    return pid, f"(pid {pid}) was ended by SIGKILL."


@contextmanager
def request_in_flight(server: ServerProcess, body: dict) -> Iterator[Callable[[], tuple[float, dict]]]:
    """A streamed request; yields what returns the moment and the text of its error."""
    with server.client() as client, ThreadPoolExecutor() as pool:
        started = []

        def talk() -> tuple[float, dict]:
            with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
                started.append(True)
                if response.status_code != 200:
                    response.read()
                    return time.monotonic(), response.json()["error"]
                frames = [line for line in response.iter_lines() if line]
            return time.monotonic(), json.loads(frames[-1].removeprefix("data: "))["error"]

        future = pool.submit(talk)
        server.wait_running(1)
        if body is ENDLESS:
            poll(lambda: server.metrics().get("generation_tokens_total", 0) > 0, "a token")
        yield lambda: future.result(EXIT_SECONDS)


def check_end(server: ServerProcess, named: str) -> None:
    assert server.wait(EXIT_SECONDS) == 1
    last = server.stderr.splitlines()[-1]
    assert last.startswith("xllm-npu: "), server.stderr
    assert named in last
    server.assert_nothing_left()


@pytest.mark.parametrize("who", ["worker", pytest.param("engine", marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", [
    pytest.param(ENDLESS, id="decode"), pytest.param(LONG, id="prefill", marks=pytest.mark.slow)])
def test_killed_at_work(tiny_dir: Path, tmp_path: Path, who: str, body: dict):
    with ServerProcess(tiny_dir, tmp_path, *TENSOR) as server:
        pid, named = victim(server, who)
        with request_in_flight(server, body) as end, server.client() as client:
            killed = kill(pid)
            health = poll(lambda: (answer := client.get("/health")).status_code != 200 and answer, "a sick server")
            noticed = time.monotonic()
            told, error = end()
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert noticed - killed < NOTICE_SECONDS
        assert told - killed < NOTICE_SECONDS
        assert error["type"] == "server_error"
        check_end(server, named)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "engine"])
def test_killed_idle(tiny_dir: Path, tmp_path: Path, who: str):
    with ServerProcess(tiny_dir, tmp_path, *TENSOR) as server:
        pid, named = victim(server, who)
        with server.client() as client:
            killed = kill(pid)
            poll(lambda: client.get("/health").status_code == 503, "a sick server")
            assert time.monotonic() - killed < NOTICE_SECONDS
        check_end(server, named)


@pytest.mark.parametrize("who", ["worker", pytest.param("engine", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_killed_while_loading(tiny_dir: Path, tmp_path: Path, who: str):
    with ServerProcess(tiny_dir, tmp_path, *TENSOR, ready=False) as server:
        pid, named = victim(server, who)
        kill(pid)
        check_end(server, named)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading", "idle", "decode"])
def test_http_process_killed(tiny_dir: Path, tmp_path: Path, moment: str):
    with ServerProcess(tiny_dir, tmp_path, *TENSOR, ready=moment != "loading") as server:
        others = server.children_of_kind(ENGINE, 1) + server.children_of_kind(WORKER, 1)
        if moment == "decode":
            with server.client() as client, client.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as r:
                lines = r.iter_lines()
                next(lines)
                killed = kill(server.pid)
                with pytest.raises(httpx.TransportError):
                    list(lines)
        else:
            killed = kill(server.pid)
        poll(lambda: all(gone(pid) for pid in others), "the end of the others")
        assert time.monotonic() - killed < NOTICE_SECONDS
        assert server.wait() == -signal.SIGKILL
        server.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_stands_still(tiny_dir: Path, tmp_path: Path):
    with ServerProcess(tiny_dir, tmp_path, *TENSOR, "--collective-timeout", "3") as server:
        pid, _ = victim(server, "worker")
        with request_in_flight(server, ENDLESS) as end:
            psutil.Process(pid).suspend()
            _, error = end()
        # stopped before it came to the collective, or in it
        found = re.search(r"rank 1 (did not arrive at|has given no sign of life since coming to) collective \d+, "
                          r"where rank 0 waits", error["message"])
        assert found, error["message"]
        check_end(server, found[0])


@pytest.mark.slow
def test_restart(tiny_dir: Path, tmp_path: Path):
    """The HTTP process stays, says when to come back, and gives up after the restarts it was allowed."""
    flags = (*TENSOR, "--restart-on-failure", "--max-restarts", "1")
    with ServerProcess(tiny_dir, tmp_path, *flags) as server, server.client() as client:
        short = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
        before = client.post(COMPLETIONS, json=short).json()["choices"]
        pid, named = victim(server, "worker")
        with request_in_flight(server, ENDLESS) as end:
            kill(pid)
            health = poll(lambda: (answer := client.get("/health")).status_code != 200 and answer, "a sick server")
            _, error = end()
        assert named in error["message"]
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_restarting")
        assert int(health.headers["retry-after"]) > 0
        refused = client.post(COMPLETIONS, json=short)
        assert refused.status_code in (200, 503)
        server.wait_ready()
        assert client.post(COMPLETIONS, json=short).json()["choices"] == before
        assert server.metrics()["engine_restarts_total"] == 1
        assert len(server.socket_directories()) == 2  # the other has ledgers
        again = server.children_of_kind(WORKER, 1)[0]
        assert again != pid
        kill(again)
        check_end(server, f"The worker process of rank 1 (pid {again}) was ended by SIGKILL.")
