"""Batches with several adapters, and rows without one, answer as models whose weights the adapters were added to."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.support.lora import ALL, PHI3, lora_loop, make_adapter, merged_answers, run_loop
from tests.support.tiny_model import make_tiny_model
from xllm_npu import LLM, LoRARequest, SamplingParams
from xllm_npu.state.messages import (
    SLEEPING,
    CheckWeights,
    LoadLora,
    Resume,
    Sleep,
    UnloadLora,
    UpdateWeights,
    Wake,
)
from xllm_npu.state.sampling_params import InvalidParameter

NEW_TOKENS = 12
TARGETS = {"llama": ALL, "qwen3": ALL, "phi3": PHI3}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 256, 40).tolist()  # the same beginning under every adapter
    return [rng.integers(0, 256, n).tolist() for n in (1, 9, 70)] + [shared + [n] for n in range(3)]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """architecture -> (model, adapters, requests, the answers of transformers)"""

    @cache
    def make(name):
        directory = tmp_path_factory.mktemp(name)
        model = make_tiny_model(directory / "model", name)
        adapters = [
            make_adapter(directory / "one", model, TARGETS[name], seed=1),
            make_adapter(directory / "two", model, TARGETS[name][:2], rank=8, alpha=16, seed=2, use_rslora=True),
            make_adapter(directory / "three", model, TARGETS[name][-2:], rank=1, alpha=1, seed=3),
        ]
        answers = [merged_answers(model, adapter, prompts(), NEW_TOKENS) for adapter in (None, *adapters)]
        requests = [(prompt, lora_id) for prompt in prompts() for lora_id in range(4)]
        expected = [answers[lora_id][i] for i in range(len(prompts())) for lora_id in range(4)]
        assert len({str(answer) for answer in expected}) > len(expected) // 2, "the adapters change nothing"
        return model, adapters, requests, expected

    return make


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "phi3"))])
def test_mixed_batches_equal_merged_models(family, name):
    model, adapters, requests, expected = family(name)
    loop = lora_loop(model, adapters)
    try:
        assert run_loop(loop, requests, NEW_TOKENS) == expected
        # Once more, with prefixes in the cache: a beginning computed with one adapter is not another's.
        assert run_loop(loop, requests, NEW_TOKENS, first_id=len(requests)) == expected
        assert loop.scheduler.running.blocks.prefix.stats.hits > 0
    finally:
        loop.close()


CHUNKS = {"max_tokens_per_chunk_for_prefill": 24, "max_tokens_per_batch": 64}
SMALL = {"max_cache_size": 26 * 4096, "max_model_len": 160, "prefill_scheduling_memory_usage_threshold": 1.0}
WAYS = {
    "adapters take turns": {**CHUNKS, "max_loras": 1},
    "preemption": {**CHUNKS, **SMALL, "max_loras": 2},
    "everything off": {"enable_prefix_cache": False, "enable_chunked_prefill": False, "max_tokens_per_batch": 1024,
                       "enable_schedule_overlap": False, "max_loras": 2},
    "graph": {**CHUNKS, "enable_graph": True, "graph_batch_sizes": (1, 8)},
    "virtual memory": {"enable_vmm_kvcache": True, "enable_vmm_weights": True, "phy_page_granularity_size": 4096},
}


@pytest.mark.parametrize("way", [
    "adapters take turns", "preemption", pytest.param("everything off", marks=pytest.mark.slow),
    pytest.param("graph", marks=pytest.mark.slow), pytest.param("virtual memory", marks=pytest.mark.slow)])
def test_however_the_work_is_scheduled(family, way):
    model, adapters, requests, expected = family("llama")
    loop = lora_loop(model, adapters, **WAYS[way])
    try:
        assert run_loop(loop, requests, NEW_TOKENS) == expected
        if way == "preemption":
            assert loop.scheduler.stats.preemptions_total > 0
    finally:
        loop.close()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["qwen3", "llama", "phi3"])
def test_two_tensor_parallel_ranks(family, name):
    model, adapters, requests, expected = family(name)
    loop = lora_loop(model, adapters, tp_size=2, max_loras=2)
    try:
        assert run_loop(loop, requests, NEW_TOKENS) == expected
        assert "no such directory" in loop.command(LoadLora(9, "/nowhere")).error
        assert loop.command(UnloadLora(1)).error == ""
        without = [(request, answer) for request, answer in zip(requests, expected) if request[1] != 1]
        assert run_loop(loop, [r for r, _ in without], NEW_TOKENS, first_id=100) == [a for _, a in without]
    finally:
        loop.close()


def test_an_adapter_that_is_loaded_anew_is_another(family):
    model, adapters, requests, expected = family("llama")
    loop = lora_loop(model, [])
    try:
        answers = {lora_id: [a for (_, i), a in zip(requests, expected) if i == lora_id] for lora_id in range(4)}
        for lora_id in range(1, 5):  # through one slot, with the prefixes of those before it in the cache
            other = 1 + lora_id % 3
            assert loop.command(LoadLora(lora_id, str(adapters[other - 1]))).error == ""
            asked = [(prompt, lora_id) for prompt in prompts()]
            assert run_loop(loop, asked, NEW_TOKENS, first_id=1000 * lora_id) == answers[other]
            assert loop.command(UnloadLora(lora_id)).error == ""
        assert not loop.scheduler.running.adapters.loaded
    finally:
        loop.close()


def test_a_request_for_an_adapter_that_is_gone_is_refused(family):
    model, adapters, requests, _ = family("llama")
    loop = lora_loop(model, adapters[:1])
    try:
        with pytest.raises(AssertionError, match="not loaded any more"):
            run_loop(loop, [(requests[0][0], 7)], NEW_TOKENS)
    finally:
        loop.close()


@pytest.mark.slow
def test_adapters_stay_while_the_model_sleeps(family):
    model, adapters, requests, expected = family("llama")
    loop = lora_loop(model, adapters, **WAYS["virtual memory"])
    try:
        for level in (1, 2):
            assert loop.change(Sleep(level, "abort")).state == SLEEPING
            if level == 2:  # one may come meanwhile
                assert loop.command(UnloadLora(3)).error == ""
                assert loop.command(LoadLora(3, str(adapters[2]))).error == ""
            loop.change(Wake([]))
            loop.change(Resume())
            assert run_loop(loop, requests, NEW_TOKENS, first_id=1000 * level) == expected
    finally:
        loop.close()


@pytest.mark.slow
def test_the_python_api_loads_adapters_as_they_are_named(family):
    model, adapters, requests, expected = family("llama")
    named = [LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, 1)]
    with LLM(str(model), dtype="float32", block_size=16, max_cache_size="24MiB", num_threads=1, enable_lora=True,
             max_loras=2, max_cpu_loras=3) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
        results = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False,
                               lora_request=[named[i - 1] if i else None for _, i in requests])
        assert [result.outputs[0].token_ids for result in results] == expected
        other = LoRARequest("one again", 9, str(adapters[0]))  # for which another has to go
        [prompt] = {tuple(prompt) for prompt, _ in requests[:1]}
        [result] = llm.generate([list(prompt)], params, use_tqdm=False, lora_request=other)
        assert result.outputs[0].token_ids == expected[1]
        with pytest.raises(InvalidParameter, match="cannot be loaded"):
            llm.generate("x", lora_request=LoRARequest("none", 10, str(model)))


@pytest.mark.slow
def test_adapters_stay_when_the_weights_below_them_are_replaced(family, tmp_path):
    model, adapters, requests, expected = family("llama")
    other = make_tiny_model(tmp_path / "other", "llama", seed=9)
    answers = [merged_answers(other, adapter, prompts(), NEW_TOKENS) for adapter in (None, *adapters)]
    loop = lora_loop(model, adapters)
    try:
        assert run_loop(loop, requests, NEW_TOKENS) == expected
        for message in (CheckWeights(str(other)), UpdateWeights(str(other)), Resume()):
            assert loop.change(message).error == ""
        assert run_loop(loop, requests, NEW_TOKENS, first_id=len(requests)) == [
            answers[lora_id][i] for i in range(len(prompts())) for lora_id in range(4)]
    finally:
        loop.close()
