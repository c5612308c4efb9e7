"""Two tensor-parallel ranks, the second a process of its own, against one: the same tokens whatever is switched on."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import psutil
import pytest

from tests.support.engine import run_engine
from tests.support.server import WORKER
from tests.support.tiny_model import make_tiny_model
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.state.messages import SEQUENCES_PER_REQUEST, AddRequest
from xllm_npu.state.sampling_params import SamplingParams

pytestmark = pytest.mark.multiprocess

NEW_TOKENS = 24
CHUNKS = {"max_tokens_per_chunk_for_prefill": 24, "max_tokens_per_batch": 64}
SMALL = {"max_cache_size": 26 * 4096, "max_model_len": 256, "prefill_scheduling_memory_usage_threshold": 1.0}
PAGES = {"enable_vmm_kvcache": True, "phy_page_granularity_size": 4096}
WAYS = {
    "everything on": CHUNKS,
    "everything off": {"enable_prefix_cache": False, "enable_chunked_prefill": False, "max_tokens_per_batch": 1024,
                       "enable_schedule_overlap": False},
    "preemption": {**CHUNKS, **SMALL},
    "no shared memory": {**CHUNKS, "enable_shm": False},
    "virtual memory": {**CHUNKS, **PAGES},
    "memory that grows": {**CHUNKS, **PAGES, "vmm_elastic": True},
    "memory that grows, preemption": {**CHUNKS, **SMALL, **PAGES, "vmm_elastic": True, "max_cache_size": 40 * 4096},
    "graph": {**CHUNKS, "enable_graph": True, "graph_batch_sizes": (1, 4, 16)},
}
SLOW_GRAPH = pytest.param("graph", marks=pytest.mark.slow)
SLOW_WAYS = [pytest.param(way, marks=pytest.mark.slow) for way in (
    "everything off", "no shared memory", "virtual memory", "memory that grows", "preemption",
    "memory that grows, preemption")]


def workers() -> list[psutil.Process]:
    """Worker processes of this process; other tests' servers may run beside them."""
    return [p for p in psutil.Process().children() if WORKER in p.cmdline()]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 60).tolist()
    return ([rng.integers(0, 256, int(n)).tolist() for n in np.geomspace(1, 140, 11)]
            + [shared + rng.integers(0, 256, int(n)).tolist() for n in (1, 4, 9, 20, 30)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """name of an architecture -> (directory, what one rank answers)"""

    @cache
    def make(name):
        directory = make_tiny_model(tmp_path_factory.mktemp("models") / name, name)
        return directory, run_engine(directory, prompts(), NEW_TOKENS, **CHUNKS)[0]

    return make


@pytest.mark.parametrize("way", ["everything on", *SLOW_WAYS, SLOW_GRAPH])
def test_same_tokens(model, way):
    directory, expected = model("llama")
    answers, loop = run_engine(directory, prompts(), NEW_TOKENS, tp_size=2, **WAYS[way])
    assert answers == expected
    stats = loop.scheduler.stats
    assert (stats.preemptions_total > 0) == way.endswith("preemption")
    assert (stats.prefix_hits_total > 0) == (way != "everything off")
    assert loop.ready.ranks == 2
    assert not workers(), "the worker process has ended with its engine"


@pytest.mark.parametrize("way", [pytest.param("everything on", marks=pytest.mark.slow), "preemption", SLOW_GRAPH])
def test_latents_on_every_rank_and_experts_on_one(model, way):
    directory, expected = model("deepseek_v3")
    answers, loop = run_engine(directory, prompts(), NEW_TOKENS, tp_size=2, ep_size=2, **WAYS[way])
    assert answers == expected
    assert (loop.scheduler.stats.preemptions_total > 0) == way.endswith("preemption")
    # 2 layers * (24 + 8) values * 4 bytes a token on each rank, the dummy block included
    assert loop.ready.kv_cache_bytes == (loop.ready.num_kv_blocks + 1) * 16 * 256


@pytest.mark.slow
def test_key_heads_fewer_than_ranks(model):
    directory, expected = model("qwen3")
    assert run_engine(directory, prompts(), NEW_TOKENS, tp_size=4, **CHUNKS)[0] == expected


def answers_of(directory, params: list[SamplingParams], **settings):
    """{(request, sequence): ([tokens], [logprobs])}, and each request's prompt log probabilities"""
    options = {"dtype": "float32", "block_size": 16, "max_cache_size": "24MiB", "num_threads": 1, "random_seed": 7,
               **settings}
    loop = EngineLoop.create(settings_from_kwargs(model=str(directory), **options))
    found, of_prompt = {}, {}
    try:
        for i, (p, prompt) in enumerate(zip(params, prompts())):
            loop.submit(AddRequest(request_id=i, external_id=str(i), prompt=np.array(prompt, np.int32).tobytes(),
                                   params=p, arrival_time=time.time()))
        while loop.has_work():
            outputs = loop.step()
            for key, token in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
                tokens, logprobs = found.setdefault(divmod(key, SEQUENCES_PER_REQUEST), ([], []))
                tokens.append(token)
                if key in outputs.logprobs:
                    logprobs.append(outputs.logprobs[key])
            for info in outputs.prompts:
                of_prompt[info.request_id] = info.prompt_logprobs
            assert not [f for f in outputs.finished if f.message]
    finally:
        loop.close()
    return found, of_prompt


@pytest.mark.slow
def test_seeds_penalties_and_logprobs(model):
    directory, _ = model("llama")
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, seed=i, n=1 + i % 3, logprobs=3,
                       repetition_penalty=1.3, top_p=0.9, prompt_logprobs=2 if i % 2 else None)
        for i in range(8)
    ]
    one, one_prompt = answers_of(directory, params)
    two, two_prompt = answers_of(directory, params, tp_size=2)
    assert {k: v[0] for k, v in one.items()} == {k: v[0] for k, v in two.items()}
    for key in one:
        for mine, theirs in zip(one[key][1], two[key][1], strict=True):
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    for request, rows in one_prompt.items():
        if rows is None:
            assert two_prompt[request] is None
            continue
        for mine, theirs in zip(rows, two_prompt[request], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


def test_heads_that_cannot_be_cut(model):
    directory, _ = model("llama")
    with pytest.raises(ValueError, match=r"tp_size=3 cannot cut .* sizes that work: 1, 2, 4"):
        run_engine(directory, prompts(), 1, tp_size=3)
    assert not workers()
