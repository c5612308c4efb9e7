"""A server whose KV cache grows and shrinks: the memory that its engine process really has, and what it says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.support.server import ServerProcess, poll

pytestmark = pytest.mark.multiprocess

MIB = 2**20
FLAGS = ("--enable-vmm-kvcache", "--vmm-elastic", "--max-cache-size", "256MiB", "--max-model-len", "8192",
         "--phy-page-granularity-size", "256KiB")
PROMPT_TOKENS, NEW_TOKENS, REQUESTS = 2000, 400, 24
BYTES_PER_TOKEN = 512  # two layers, K and V, in the tiny model's float32


def resident(pid: int) -> tuple[int, int]:
    """(bytes of shared memory, all bytes) that the system says are resident in a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024, psutil.Process(pid).memory_info().rss
    raise AssertionError("the kernel does not say")


def test_done_when_1_resident_bytes_follow_live_kv(tiny_dir: Path, tmp_path: Path):
    """Twice, so that what the first load needed for good (threads, allocators) is there before the second."""
    with ServerProcess(tiny_dir, tmp_path, *FLAGS) as server:
        pid = server.engine_pid

        async def load(start: int) -> int:
            """Long prompts at once; the most shared memory that was resident meanwhile."""
            async with server.async_client() as client:
                bodies = [{"prompt": [32 + (start + i) % 60] * 10 + [32 + j % 80 for j in range(PROMPT_TOKENS - 10)],
                           "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True} for i in range(REQUESTS)]
                asks = [asyncio.create_task(client.post("/v1/completions", json=body, timeout=240)) for body in bodies]
                most = 0
                while not all(ask.done() for ask in asks):
                    await asyncio.sleep(0.02)
                    most = max(most, resident(pid)[0])
                assert [ask.result().status_code for ask in asks] == [200] * REQUESTS
            return most

        asyncio.run(load(0))
        poll(lambda: server.metrics()["kv_cache_pages:mapped"] == 1, "the pinned page alone")
        shared, everything = resident(pid)
        most = asyncio.run(load(100))
        assert most - shared > 0.8 * REQUESTS * PROMPT_TOKENS * BYTES_PER_TOKEN, "memory did not grow with live KV"
        metrics = poll(lambda: (m := server.metrics())["kv_cache_pages:mapped"] == 1 and m, "the pinned page alone")
        assert metrics["kv_cache_pages:pinned"] == 1
        after, everything_after = resident(pid)
        assert after <= shared + 0.05 * (most - shared)
        assert everything_after <= 1.05 * everything


@pytest.mark.slow
def test_data_parallel_engines_grow_and_shrink_alone(tiny_dir: Path, tmp_path: Path):
    with ServerProcess(tiny_dir, tmp_path, *FLAGS, "--dp-size", "2") as server:

        async def load() -> None:
            async with server.async_client() as client:
                bodies = [{"prompt": [32 + i] * 1500, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
                          for i in range(8)]
                answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
                assert [answer.status_code for answer in answers] == [200] * 8

        asyncio.run(load())
        server.wait_idle()
        poll(lambda: (m := server.metrics()) and [m.get(f"kv_cache_pages:mapped@{rank}") for rank in (0, 1)] == [1, 1],
             "the pinned page of each")


@pytest.mark.slow
def test_a_client_that_leaves_takes_its_memory_along(tiny_dir: Path, tmp_path: Path):
    with ServerProcess(tiny_dir, tmp_path, *FLAGS) as server:

        async def leave() -> None:
            async with server.async_client() as client, client.stream("POST", "/v1/completions", json={
                    "prompt": [40] * 3000, "temperature": 0, "max_tokens": 4000, "ignore_eos": True,
                    "stream": True}) as reply:
                assert reply.status_code == 200
                async for _ in reply.aiter_lines():
                    break

        asyncio.run(leave())
        server.wait_idle()
        poll(lambda: server.metrics()["kv_cache_pages:mapped"] == 1, "the pinned page alone")
