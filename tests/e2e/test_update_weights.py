"""Weights that are replaced in a server that runs: over HTTP, on several ranks and engines, and under load."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.engine import run_engine
from tests.support.master import Answer, metric, prompt_of, running_master, until
from tests.support.server import DEADLINE, ENGINE, ServerProcess
from tests.support.tiny_model import make_tiny_model
from xllm_npu.master.llm_master import EngineStatus, LLMMaster
from xllm_npu.master.residency_error import ResidencyError

pytestmark = pytest.mark.multiprocess
PROMPT = prompt_of(40)
COUNT = 12


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("new") / "m", seed=7, max_length=32768)


def tokens_of(model: Path, prompt: list[int], count: int = COUNT) -> list[int]:
    return run_engine(model, [prompt], count)[0][0]


def test_over_http(tiny_dir, new, tmp_path):
    """That answers are those of a server started with the checkpoint, other tests say."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bad = tmp_path / "bad"
    shutil.copytree(new, bad)
    (bad / "model.safetensors").write_bytes(b"x")
    with (
        ServerProcess(tiny_dir, tmp_path / "run", "--admin-port", str(port), "--dtype", "float32", uds=True) as server,
        server.client() as api, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as admin,
    ):

        def answer() -> list[int]:
            reply = api.post("/v1/completions", json={
                "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True})
            assert reply.status_code == 200, reply.text
            return list(reply.json()["choices"][0]["token_ids"])

        before = answer()
        refused = admin.post("/update_weights", json={"path": str(bad)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_checkpoint")
        assert answer() == before
        reply = admin.post("/update_weights", json={"path": str(new)})
        assert reply.status_code == 200, reply.text
        assert (reply.json()["status"], reply.json()["version"]) == ("updated", 1)
        after = answer()
        assert after != before
        assert answer() == after
        info = admin.get("/weight_info").json()
        size = sum(file.stat().st_size for file in new.glob("*.safetensors"))
        assert (info["path"], info["version"], info["dtype"]) == (str(new), 1, "float32")
        assert info["bytes"] == 4 * info["parameters"]
        assert size - 10_000 < info["bytes"] < size
        assert admin.get("/get_world_size").json() == {"world_size": 1}
        reply = admin.post("/update_weights_from_disk", json={"model_path": str(tiny_dir)})
        assert (reply.status_code, reply.json()["success"]) == (200, True)
        assert answer() == before
        assert admin.get("/status").json()["models"][0]["weights"] == {"path": str(tiny_dir), "version": 2}
        assert server.metrics()["residency_transition_seconds_count:update"] == 2


def kill_engine(module: str) -> None:
    (found, *_) = [p for p in psutil.Process().children(recursive=True) if module in p.cmdline()]
    os.kill(found.pid, signal.SIGKILL)


async def restarted(master: LLMMaster) -> None:
    await until(lambda: master.status is EngineStatus.RESTARTING, "the end")
    await until(lambda: master.status in (EngineStatus.READY, EngineStatus.SLEEPING), "the restart", 200.0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2}, {"tp_size": 2, "dp_size": 2}])
async def test_several_ranks_under_load(tiny_dir, new, sizes):
    """Kept requests go on with the new weights, and the engines that replace dead ones have them."""
    first, second = tokens_of(tiny_dir, PROMPT, 200), tokens_of(new, PROMPT)
    async with running_master(tiny_dir, **sizes, restart_on_failure=True) as master:
        assert await Answer(master, PROMPT, COUNT).whole() == first[:COUNT]
        running = [Answer(master, PROMPT, 200) for _ in range(4)]
        for one in running:
            await one.begun(8)
        assert await master.update_weights(str(new), "keep") == 1
        had = [list(one.tokens[0]) for one in running]
        for one, begun in zip(running, had):
            whole = await one.whole()
            assert whole != first
            changed = next(i for i in range(200) if whole[i] != first[i])
            assert changed >= len(begun) - 1
            assert whole[changed:] == tokens_of(new, PROMPT + whole[:changed], 200 - changed)
        assert await Answer(master, PROMPT, COUNT).whole() == second
        kill_engine(ENGINE)
        await restarted(master)
        assert await Answer(master, PROMPT, COUNT).whole() == second
        assert (master.weights.checkpoint, master.weights.version) == (str(new), 1)


@pytest.mark.slow
async def test_a_file_that_breaks_on_one_rank_leaves_all_with_the_old_weights(tiny_dir, new, tmp_path, monkeypatch):
    """Headers are whole when they are checked, and the file is not when it is read."""
    spoiled = tmp_path / "m"
    shutil.copytree(new, spoiled)
    expected = tokens_of(tiny_dir, PROMPT)
    async with running_master(tiny_dir, tp_size=2, dp_size=2) as master:
        ask = type(master._engines).ask

        async def spoil(self, message, ranks=None):
            if type(message).__name__ == "UpdateWeights" and message.checkpoint == str(spoiled):
                os.truncate(spoiled / "model.safetensors", 20_000)
            return await ask(self, message, ranks)

        monkeypatch.setattr(type(master._engines), "ask", spoil)
        with pytest.raises(ResidencyError, match="truncated") as failed:
            await master.update_weights(str(spoiled), "keep")
        assert failed.value.code == "failed"
        assert await Answer(master, PROMPT, COUNT).whole() == expected
        assert await Answer(master, PROMPT, COUNT).whole() == expected
        assert metric(master, "residency_transition_failures_total", transition="update", reason="failed") == 1


@pytest.mark.slow
async def test_asleep_and_restarted_asleep(tiny_dir, new):
    second = tokens_of(new, PROMPT)
    virtual = {"enable_vmm_weights": True, "enable_vmm_kvcache": True, "phy_page_granularity_size": 16384}
    async with running_master(tiny_dir, tp_size=2, restart_on_failure=True, **virtual) as master:
        await master.sleep(2)
        await master.update_weights(str(new))
        await master.wake()
        assert await Answer(master, PROMPT, COUNT).whole() == second
        await master.sleep(1)
        kill_engine(ENGINE)
        await restarted(master)
        await until(lambda: master.residency.state == "sleeping", "it sleeps again")
        await master.wake()
        assert await Answer(master, PROMPT, COUNT).whole() == second


@pytest.mark.slow
async def test_experts_over_ranks_that_step_together(tmp_path):
    """Experts that have moved are where the checkpoint has them again."""
    shape = {"num_experts": 8, "moe_intermediate_size": 32}
    first = make_tiny_model(tmp_path / "a", "qwen3_moe", **shape)
    second = make_tiny_model(tmp_path / "b", "qwen3_moe", seed=3, **shape)
    expected = tokens_of(second, PROMPT)
    async with running_master(first, dp_size=2, ep_size=2, enable_eplb=True, eplb_update_interval=20) as master:
        before = [await Answer(master, prompt_of(30, seed), 40).whole() for seed in range(4)]
        for checkpoint in (second, first):
            running = [Answer(master, PROMPT, 100) for _ in range(3)]
            await running[0].begun(10)
            await master.update_weights(str(checkpoint), "wait")
            assert all(one.done for one in running)
            if checkpoint == second:
                assert await Answer(master, PROMPT, COUNT).whole() == expected
        assert [await Answer(master, prompt_of(30, seed), 40).whole() for seed in range(4)] == before


@pytest.mark.slow
async def test_a_rank_that_dies_while_it_loads_is_started_again_with_the_old_weights(tiny_dir, new, monkeypatch):
    expected = tokens_of(tiny_dir, PROMPT)
    async with running_master(tiny_dir, dp_size=2, restart_on_failure=True) as master:
        ask = type(master._engines).ask

        async def kill(self, message, ranks=None):
            if type(message).__name__ == "UpdateWeights":
                kill_engine(ENGINE)
            return await ask(self, message, ranks)

        monkeypatch.setattr(type(master._engines), "ask", kill)
        with pytest.raises(ResidencyError) as gone:
            await master.update_weights(str(new))
        assert gone.value.code == "gone"
        monkeypatch.undo()
        await restarted(master)
        assert await Answer(master, PROMPT, COUNT).whole() == expected
        assert await master.update_weights(str(new)) == 1


@pytest.mark.slow
async def test_requests_that_an_operator_ends(tiny_dir):
    async with running_master(tiny_dir) as master:
        running = [Answer(master, prompt_of(20, seed), 900, n=2) for seed in range(2)]
        for one in running:
            await one.begun(5)
        assert master.abort(["no such request"]) == 0
        assert master.abort() == 2
        for one in running:
            await one.whole()
            assert set(one.reasons.values()) == {"abort"}
        await until(lambda: metric(master, "num_requests_running") == 0, "an idle engine")
        assert len(await Answer(master, PROMPT, 5).whole()) == 5
