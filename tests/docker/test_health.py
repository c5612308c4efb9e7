"""The health check finds the server where the environment says it listens."""

from __future__ import annotations

import http.server
import importlib.util
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker/health.py"
SPEC = importlib.util.spec_from_file_location("docker_health", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
health = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(health)


class Handler(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass

    def address_string(self) -> str:
        return "here"


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("XLLM_NPU_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(Handler, "status", 200)
    monkeypatch.setattr(health, "SECONDS", 5.0)


def serving(server: socketserver.BaseServer) -> Iterator[socketserver.BaseServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    for server in serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)):
        yield server.server_address[1]  # type: ignore[misc]


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_server_that_answers(host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLLM_NPU_PORT", str(port))
    monkeypatch.setenv("XLLM_NPU_HOST", host)
    assert health.main() == 0
    Handler.status = 503  # as while a model is loaded
    assert health.main() == 1


def test_settings_from_a_file(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.json").write_text(f'{{"port": {port}}}')
    monkeypatch.setenv("XLLM_NPU_CONFIG_JSON_FILE", str(tmp_path / "c.json"))
    assert health.main() == 0


def test_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    monkeypatch.setenv("XLLM_NPU_UDS", str(path))
    for _ in serving(UnixServer(str(path), Handler)):
        assert health.main() == 0
    assert health.main() == 1


def test_no_answer_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("XLLM_NPU_PORT", str(reserved.getsockname()[1]))
        assert health.main() == 1
    monkeypatch.setenv("XLLM_NPU_PROT", "1")
    assert health.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.startswith("no answer: ") for line in said] == [True, True]
    assert "XLLM_NPU_PORT" in said[1]
