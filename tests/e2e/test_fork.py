"""A model and its fork in one server: the same tokens, weights that are there once, and one lives on without the other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.server import ENGINE, WORKER, ServerProcess, poll
from tests.support.tiny_model import make_tiny_model
from xllm_npu.master.cluster.network import free_ports

pytestmark = pytest.mark.multiprocess

MIB = 2**20
FLAGS = ("--enable-vmm-kvcache", "--vmm-elastic", "--enable-vmm-weights", "--max-cache-size", "256MiB",
         "--max-model-len", "512", "--phy-page-granularity-size", "64KiB", "--dtype", "float32")
START_SECONDS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Weights that stand out: 40 MB."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "alpha", hidden=512, layers=4)


@contextmanager
def serving(model: Path, directory: Path, *flags: str) -> Iterator[tuple[ServerProcess, httpx.Client, httpx.Client]]:
    port = free_ports("127.0.0.1", 1)[0]
    with (ServerProcess(model, directory, *FLAGS, "--admin-port", str(port), *flags, uds=True) as server,
          server.client() as client,
          httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_SECONDS) as admin):
        yield server, client, admin


def fork(admin: httpx.Client, name: str = "beta", source: str = "alpha") -> None:
    reply = admin.post("/fork_master", json={"model_id": name, "model": source})
    assert reply.status_code == 200, reply.text


def text(client: httpx.Client, model: str) -> str:
    body = {"prompt": "Fork me", "max_tokens": 30, "temperature": 0, "model": model}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def page_bytes(pids: list[int]) -> int:
    """Committed bytes of all files of pages that these processes have; each counts once, whoever has it."""
    found: dict[int, int] = {}
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                if "xllm-npu-pages" in os.readlink(path):
                    status = os.stat(path)
                    found[status.st_ino] = status.st_blocks * 512
            except FileNotFoundError:
                pass
    return sum(found.values())


def proportional(pids: list[int]) -> int:
    """Of all resident pages, shared ones in equal parts (Pss)."""
    return sum(int(line.split()[1]) * 1024 for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text(
    ).splitlines() if line.startswith("Pss_Shmem:"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_done_when_1_a_fork_has_the_tokens_and_takes_no_memory_for_weights(model, tmp_path, ranks):
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    with serving(model, tmp_path, "--tp-size", str(ranks)) as (server, client, admin):
        expected = text(client, "alpha")

        def pids(engines: int) -> list[int]:
            others = server.children_of_kind(WORKER, engines * (ranks - 1)) if ranks > 1 else []
            return server.children_of_kind(ENGINE, engines) + others

        poll(lambda: server.metrics()["kv_cache_pages:mapped"] == 1, "an idle cache")
        files, resident = page_bytes(pids(1)), proportional(pids(1))
        assert files > weights
        fork(admin)
        poll(lambda: page_bytes(pids(2)) < files + 0.05 * weights, "the fork's first pages to go back")
        assert proportional(pids(2)) < resident + 0.05 * weights
        assert [text(client, name) for name in ("beta", "alpha", "beta")] == [expected] * 3
        again = admin.post("/fork_master", json={"model_id": "beta", "model": "alpha"})
        assert again.status_code == 200, "forking is idempotent"
        assert len(pids(2)) == 2 * ranks

        os.kill(pids(2)[0], signal.SIGKILL)  # the parent's engine
        poll(lambda: "'alpha' has stopped" in client.get("/health").text, "the end of the parent")
        assert text(client, "beta") == expected
        for _ in range(2):  # there is nobody to share with any more
            assert admin.post("/sleep", params={"model": "beta"}).status_code == 200
            assert admin.post("/wake_up", params={"model": "beta"}).status_code == 200
            assert text(client, "beta") == expected


@pytest.mark.slow
def test_parent_and_fork_sleep_wake_and_die_in_any_order(model, tmp_path):
    with serving(model, tmp_path, "--restart-on-failure") as (server, client, admin):

        def sleep(name: str, level: int = 1) -> None:
            assert admin.post("/sleep", params={"model": name, "level": level}).status_code == 200

        def wake(name: str) -> None:
            reply = admin.post("/wake_up", params={"model": name})
            assert reply.status_code == 200, reply.text

        expected = text(client, "alpha")
        fork(admin)
        fork(admin, "gamma", "beta")  # a fork's fork has the same parent
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))

        def files() -> int:
            return page_bytes(server.children_of_kind(ENGINE, 3))

        assert files() < 1.2 * weights
        sleep("alpha")
        assert {text(client, name) for name in ("beta", "gamma")} == {expected}
        sleep("beta", 2)
        assert text(client, "gamma") == expected
        wake("alpha")
        assert text(client, "alpha") == expected
        wake("beta")
        assert text(client, "beta") == expected
        for name in ("gamma", "beta", "alpha"):
            sleep(name)
        poll(lambda: files() < 0.05 * weights, "all memory to go back")
        for name in ("alpha", "beta", "gamma"):
            wake(name)
        assert {text(client, name) for name in ("alpha", "beta", "gamma")} == {expected}
        poll(lambda: files() < 1.2 * weights, "weights that are there once")

        before = set(server.children_of_kind(ENGINE, 3))
        os.kill(server.children_of_kind(ENGINE, 3)[1], signal.SIGKILL)  # a fork, which shares again
        poll(lambda: client.get("/health").status_code == 503, "an unhealthy server")
        assert {text(client, name) for name in ("alpha", "gamma")} == {expected}
        server.wait_ready()
        assert text(client, "beta") == expected
        assert len(before & set(server.children_of_kind(ENGINE, 3))) == 2
        poll(lambda: files() < 1.2 * weights, "weights that are there once")


@pytest.mark.slow
def test_what_cannot_be_forked_says_why(model, tmp_path):
    with serving(model, tmp_path) as (_, client, admin):
        assert admin.post("/sleep").status_code == 200
        asleep = admin.post("/fork_master", json={"model_id": "beta", "model": "alpha"})
        assert asleep.status_code == 409, asleep.text
        assert "not awake" in asleep.json()["error"]["message"]
        assert admin.post("/wake_up").status_code == 200
        assert text(client, "alpha")
