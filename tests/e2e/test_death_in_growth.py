"""Rank 1 is killed while all ranks prepare pages: rank 0 has its own already. The server ends, or starts its engine
again; nothing is left of either.
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.test_fork import page_bytes
from tests.support.server import WORKER, ServerProcess, poll

pytestmark = pytest.mark.multiprocess

FLAGS = ("--tp-size", "2", "--enable-vmm-kvcache", "--vmm-elastic", "--enable-vmm-weights", "--max-model-len", "1024",
         "--phy-page-granularity-size", "16KiB", "--max-cache-size", "64MiB", "--dtype", "float32")
LONG = {"prompt": "Many blocks, for which there is no page yet. " * 12, "max_tokens": 8, "temperature": 0}
COMPLETIONS = "/v1/completions"


# In the engine's process: the first call to prepare a growth finds rank 1 standing still, once the test has named it.
HOLD = """
import os, signal, sys
if "xllm_npu.master.engine_process" in sys.orig_argv:
    from xllm_npu.memory.worker_memory_rpc import WorkerMemoryRpcClient
    start, named = WorkerMemoryRpcClient.start, {named!r}

    def hold(self, call):
        if call.verb == "prepare" and os.path.exists(named):
            os.kill(int(open(named).read()), signal.SIGSTOP)
            os.rename(named, named + ".held")
        start(self, call)

    WorkerMemoryRpcClient.start = hold
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the test writes the process id of rank 1."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(HOLD.format(named=str(tmp_path / "rank-1")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *sys.path]))
    return tmp_path / "rank-1"


def kill_in_prepare(server: ServerProcess, named: Path) -> tuple[int, dict]:
    """(the process id of the rank that was killed, the error that the request in flight ended with)"""
    engine, rank_1 = server.engine_pid, server.children_of_kind(WORKER, 1)[0]
    rest = page_bytes([engine])
    (named.parent / "new").write_text(str(rank_1))
    (named.parent / "new").rename(named)
    with server.client() as client, ThreadPoolExecutor() as pool:
        asked = pool.submit(client.post, COMPLETIONS, json=LONG, timeout=100)
        poll(lambda: page_bytes([engine]) > rest, "rank 0 to have prepared")
        assert named.with_name("rank-1.held").exists()
        os.kill(rank_1, signal.SIGKILL)
        return rank_1, asked.result(100).json()["error"]


@pytest.mark.slow
def test_the_server_ends_and_names_the_rank(tiny_dir: Path, tmp_path: Path, named: Path):
    with ServerProcess(tiny_dir, tmp_path, *FLAGS) as server:
        pid, error = kill_in_prepare(server, named)
        dead = f"The worker process of rank 1 (pid {pid}) was ended by SIGKILL."
        assert dead in error["message"]
        assert server.wait() == 1
        assert dead in server.stderr.splitlines()[-1]
        server.assert_nothing_left()


@pytest.mark.slow
def test_the_engine_starts_again_with_all_of_its_memory(tiny_dir: Path, tmp_path: Path, named: Path):
    flags = (*FLAGS, "--restart-on-failure")
    with ServerProcess(tiny_dir, tmp_path, *flags) as server, server.client() as client:
        expected = client.post(COMPLETIONS, json=LONG).json()["choices"]
        poll(lambda: server.metrics()["kv_cache_pages:mapped"] == 1, "an idle cache")
        kill_in_prepare(server, named)
        server.wait_ready()
        assert client.post(COMPLETIONS, json=LONG).json()["choices"] == expected
        poll(lambda: server.metrics()["kv_cache_pages:mapped"] == 1, "an idle cache")
