"""Two ranks, one a process of its own, that sleep and wake together: tokens, weights, bytes of both processes."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest

from tests.support.engine import run_engine
from tests.support.server import WORKER
from tests.support.sleeping import KINDS, SMALL, answer, engine_of, opened, prompts, resume, suspend
from tests.support.tiny_model import make_tiny_model
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused

pytestmark = pytest.mark.multiprocess
MODELS = {
    "llama": ({"hidden": 512, "layers": 2}, {"tp_size": 2}),
    "qwen3_moe": ({"num_experts": 8, "moe_intermediate_size": 32}, {"tp_size": 2, "ep_size": 2}),
    "deepseek_v3": ({}, {"tp_size": 2}),
}
LARGE = 4 * 2**20  # bytes that stand out in a process's


def worker() -> psutil.Process:
    (found,) = [p for p in psutil.Process().children(recursive=True) if WORKER in p.cmdline()]
    return found


@pytest.mark.parametrize(("name", "kind"), [
    ("llama", "elastic"), pytest.param("qwen3_moe", "elastic", marks=pytest.mark.slow),
    pytest.param("llama", "fixed", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "elastic", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "fixed", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "fixed", marks=pytest.mark.slow)])
def test_both_ranks_sleep_and_wake_bit_exact(tmp_path, name, kind):
    config, sizes = MODELS[name]
    model = make_tiny_model(tmp_path / "m", name, **config)
    expected = run_engine(model, prompts(), 24, **SMALL)[0]
    with opened(model, **{**KINDS[kind], **sizes, "max_cache_size": "32MiB"}) as loop:
        assert answer(loop, prompts(), 24) == expected
        before, there = engine_of(loop).weights_hash(), worker()
        for level in (1, 2):
            awake = there.memory_info().rss
            freed = suspend(loop, level)
            half = freed / 2  # what a rank has less; they differ by a few pages
            assert half < LARGE or awake - there.memory_info().rss > 0.95 * half
            assert half > LARGE or name != "llama"
            resume(loop)
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, prompts(), 24) == expected


def test_the_hash_is_of_all_ranks(tmp_path):
    """One weight of the other rank's part changes, in a file whose other half is the same."""
    import torch
    from safetensors.torch import load_file, save_file

    model = make_tiny_model(tmp_path / "m")
    file = model / "model.safetensors"
    with opened(model, **KINDS["elastic"], tp_size=2) as loop:
        before = engine_of(loop).weights_hash()
        suspend(loop, 1)
        tensors = load_file(file)
        name = "model.layers.1.mlp.up_proj.weight"
        changed = tensors[name].clone()
        changed[-1, -1] += 1
        save_file({**tensors, name: changed}, file)
        with pytest.raises(PageGrowthRefused, match=r"Rank 1: .*files have changed"):
            engine_of(loop).wake()
        save_file(tensors, file)
        resume(loop)
        assert engine_of(loop).weights_hash() == before
        assert not torch.equal(changed, tensors[name])


def test_rule_45_a_rank_that_is_killed_while_all_wake_ends_the_engine(tmp_path, monkeypatch):
    """Rank 0 holds its part until the other is gone."""
    from xllm_npu.memory.worker_residency import WorkerResidency

    model = make_tiny_model(tmp_path / "m")
    with opened(model, **KINDS["elastic"], tp_size=2) as loop:
        suspend(loop, 1)
        other, commit = worker(), WorkerResidency.commit_wake

        def kill_first(self, transaction):
            os.kill(other.pid, signal.SIGKILL)
            gone = threading.Event()
            while engine_of(loop)._others.failure is None:
                gone.wait(0.05)
            commit(self, transaction)

        monkeypatch.setattr(WorkerResidency, "commit_wake", kill_first)
        with pytest.raises(MemoryOwnershipLost):
            engine_of(loop).wake()
        with pytest.raises(Exception, match="SIGKILL"):
            engine_of(loop).check()
