"""The server's life as a process sees it: start-up, signals, exit codes."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.service.conftest import make_settings
from xllm_npu.service.server import run_server

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


class ServerProcess:
    def __init__(self, process: asyncio.subprocess.Process, uds: str) -> None:
        self._process = process
        self.uds = uds
        self.client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=uds), base_url="http://x", timeout=30)

    async def stdout_line(self) -> str:
        return (await self._process.stdout.readline()).decode().strip()

    async def stderr_until(self, text: str) -> list[str]:
        lines = []
        while not lines or text not in lines[-1]:
            line = await self._process.stderr.readline()
            assert line, f"the process ended without saying {text!r}: {lines}"
            lines.append(line.decode().rstrip())
        return lines

    def socket_exists(self) -> bool:
        return os.path.exists(self.uds)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def end(self) -> tuple[int, list[str], str]:
        """Exit code, remaining lines of stdout, remaining stderr."""
        out, err = await self._process.communicate()
        return self._process.returncode, out.decode().splitlines(), err.decode()

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncIterator[httpx.Response]:
        """A stream whose first token has arrived."""
        async with self.client.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
            assert await self.stdout_line() == "request"
            yield response


@pytest.fixture
async def started(tmp_path):
    servers = []

    async def start(**options: object) -> ServerProcess:
        uds = str(tmp_path / "socket")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.service.server_process", json.dumps({"uds": uds, **options}), cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        servers.append((server := ServerProcess(process, uds), process))
        return server

    yield start
    for server, process in servers:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await server.client.aclose()


async def ready(start, **options: object) -> ServerProcess:
    server = await start(**options)
    assert await server.stdout_line() == "started"
    await server.stderr_until("Serving at")
    return server


async def test_loading_then_ready(started):
    server = await started(loads=True)
    assert await server.stdout_line() == "started"
    response = await server.client.get("/health")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_loading")
    server.signal(signal.SIGUSR1)
    lines = await server.stderr_until("Serving at")
    assert "Loading weights 0 B of 8.0 MiB" in lines
    assert "Loading weights 8.0 MiB of 8.0 MiB" in lines
    assert sum("Loading" in line for line in lines) == 5  # lines, not bars: a quarter each
    for fact in ("Platform: cpu, test cpu", "Model: tiny (TinyForCausalLM), float32, 3.0 MiB",
                 "KV cache: 64 blocks of 16: 1,024 tokens, 1.0 MiB", "Graphs: 1, 2, 4",
                 f"Serving at: unix:{server.uds}"):
        assert fact in lines
    assert (await server.client.get("/health")).status_code == 200
    server.signal(signal.SIGTERM)
    code, out, err = await server.end()
    assert (code, out) == (0, ["shutdown 5"])
    assert "Traceback" not in err
    assert not server.socket_exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_drain_lets_requests_finish(started, number):
    server = await ready(started)
    async with server.begun() as response:
        server.signal(number)
        refused = await server.client.get("/health")
        while refused.status_code == 200:  # the signal may still be on its way
            refused = await server.client.get("/health")
        assert refused.json()["error"]["code"] == "shutting_down"
        server.signal(signal.SIGUSR1)
        text = (await response.aread()).decode()
        assert '"ended"' in text
        assert text.endswith("data: [DONE]\n\n")
    code, out, _ = await server.end()
    assert (code, out) == (0, ["shutdown 5"])


async def test_drain_ends_with_the_timeout(started):
    server = await ready(started, shutdown_timeout=0)
    async with server.begun() as response:
        server.signal(signal.SIGTERM)
        frames = (await response.aread()).decode()[:-2].split("\n\n")
        assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    code, out, _ = await server.end()
    assert (code, out) == (0, ["shutdown 5"])


async def test_second_ctrl_c_is_immediate(started):
    server = await ready(started, shutdown_timeout=1000)
    async with server.begun():
        server.signal(signal.SIGINT)
        while (await server.client.get("/health")).status_code == 200:
            pass
        server.signal(signal.SIGTERM)  # a repeated SIGTERM changes nothing
        assert (await server.client.get("/health")).status_code == 503
        server.signal(signal.SIGINT)
        code, out, _ = await server.end()
        assert (code, out) == (130, ["kill"])
        assert not server.socket_exists()


async def test_death_of_the_engine(started):
    server = await ready(started)
    async with server.begun() as response:
        server.signal(signal.SIGUSR2)
        text = (await response.aread()).decode()
        assert '"message":"The engine stopped."' in text
        assert "[DONE]" not in text
    health = await server.client.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    code, out, err = await server.end()
    assert (code, out) == (1, ["shutdown 5"])
    assert "xllm-npu: The engine stopped: the engine process was killed by signal 9.\n" in err
    assert "Traceback" not in err


async def test_death_while_loading(started):
    server = await started(loads=True)
    assert await server.stdout_line() == "started"
    server.signal(signal.SIGUSR2)
    code, out, err = await server.end()
    assert (code, out) == (1, ["shutdown 0"])
    assert "xllm-npu: Cannot start: the engine process was killed by signal 9." in err


async def test_signal_while_loading(started):
    server = await started(loads=True)
    assert await server.stdout_line() == "started"
    server.signal(signal.SIGINT)
    code, out, _ = await server.end()
    assert (code, out) == (0, ["shutdown 0"])


async def test_start_fails(started):
    server = await started(start_fails=True)
    code, out, err = await server.end()
    assert (code, out) == (1, ["shutdown 0"])
    assert err == "xllm-npu: The engine could not be started: there is no model.\n"


def test_a_taken_port_is_told_at_once(capsys):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert run_server([make_settings(port=port)]) == 1
    assert capsys.readouterr().err == (f"xllm-npu: Port {port} on 127.0.0.1 is in use. Stop what listens there, or "
                                       "choose another --port.\n")
