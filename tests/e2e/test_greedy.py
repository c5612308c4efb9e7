"""Greedy output equals transformers' `generate`, token for token in float32, however the work is scheduled.

Tiny checkpoints of every architecture and rope variant run in this process; SmolLM2 runs behind HTTP at concurrency
16, a few combinations by default and all of them with the `slow` marker.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from xllm_models.hub import resolve_model

from tests.support.engine import run_engine
from tests.support.greedy import ask_server, differences, make_prompts, reference
from tests.support.server import ServerProcess
from tests.support.tiny_model import make_tiny_model

ORIGINAL = 96  # positions before a rope scaling sets in


def rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
DEEPSEEK_YARN = {"original_max_position_embeddings": ORIGINAL, "mscale": 0.707, "mscale_all_dim": 1.0}
VARIANTS = {
    "deepseek v2": ("deepseek_v2", {}),
    "deepseek v2 direct queries": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek v3": ("deepseek_v3", {}),
    "deepseek v3 yarn": ("deepseek_v3", rope("yarn", **DEEPSEEK_YARN)),
    "glm4 moe lite": ("glm4_moe_lite", {}),
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama linear": ("llama", rope("linear")),
    "llama dynamic": ("llama", {**rope("dynamic"), "max_position_embeddings": ORIGINAL}),
    "llama llama3": ("llama", rope("llama3", **LLAMA3)),
    "llama yarn": ("llama", rope("yarn", original_max_position_embeddings=ORIGINAL)),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2 yarn": ("qwen2", rope("yarn", original_max_position_embeddings=ORIGINAL)),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2 moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 96, "norm_topk_prob": True}),
    "qwen3 moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 24}),
    "phi3": ("phi3", {"sliding_window": 24}),
    "phi3 longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)]}}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4 moe": ("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                              "use_qk_norm": True, "attention_bias": True}),
    "gemma2": ("gemma2", {"sliding_window": 24, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt oss": ("gpt_oss", {"sliding_window": 24, "num_local_experts": 8}),
}
# Their networks' numbers are tested in tests/xllm_models; to the scheduler they are others of the list.
SLOW_VARIANTS = {"llama tied", "llama linear", "llama dynamic", "llama llama3", "qwen2 yarn", "mistral",
                 "mistral window", "deepseek v2", "deepseek v2 direct queries", "deepseek v3 yarn", "glm", "glm4",
                 "glm4 moe lite", "llama yarn", "qwen2 moe", "qwen2 window", "mixtral", "phi3 longrope", "gemma2"}
POLICIES = ("decode_first", "prefill_first", "unified")
EVERYTHING_ON = {"max_tokens_per_chunk_for_prefill": 24, "max_tokens_per_batch": 64}
EVERYTHING_OFF = {"enable_prefix_cache": False, "enable_chunked_prefill": False, "enable_schedule_overlap": False,
                  "max_tokens_per_batch": 1024}
NEW_TOKENS = 24


def tiny_prompts(longest: int) -> list[list[int]]:
    """Sixteen prompts of 1 to `longest` tokens; a third shares a long beginning."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 60).tolist()
    prompts = [rng.integers(0, 256, int(n)).tolist() for n in np.geomspace(1, longest, 11)]
    return prompts + [shared + rng.integers(0, 256, int(n)).tolist() for n in (1, 4, 9, 20, 30)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name of a variant -> (directory, cases)"""

    @cache
    def make(name):
        architecture, config = VARIANTS[name]
        config = {"max_position_embeddings": 512, **config}
        directory = make_tiny_model(tmp_path_factory.mktemp("models") / "m", architecture, **config)
        torch.set_num_threads(1)  # threads only wait for each other in a model this small
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        return directory, reference(model, tiny_prompts(90 if name == "llama dynamic" else 140), NEW_TOKENS)

    return make


def check(directory, cases, **settings):
    answers, loop = run_engine(directory, [c.prompt for c in cases], NEW_TOKENS, **settings)
    assert differences(cases, answers) == []
    return loop.scheduler.stats


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW_VARIANTS else ()) for name in VARIANTS])
@pytest.mark.parametrize("settings", [pytest.param(EVERYTHING_ON, id="on"),
                                      pytest.param(EVERYTHING_OFF, id="off", marks=pytest.mark.slow)])
def test_every_architecture_and_rope_variant(checkpoint, name, settings):
    directory, cases = checkpoint(name)
    check(directory, cases, **settings)


@pytest.mark.parametrize(("policy", "prefix", "chunked", "overlap", "small"),
                         list(itertools.product(POLICIES, *[(True, False)] * 4)))
def test_every_way_of_scheduling(checkpoint, policy, prefix, chunked, overlap, small):
    directory, cases = checkpoint("llama")
    chunks = {"max_tokens_per_chunk_for_prefill": 24, "max_tokens_per_batch": 64} if chunked else {}
    # 2 layers * 2 (K, V) * 2 heads * 16 * 4 bytes: 512 bytes a token, 8 KiB a block; 26 blocks hold two long sequences
    cache_size = {"max_cache_size": 26 * 8192, "max_model_len": 256, "prefill_scheduling_memory_usage_threshold": 1.0}
    stats = check(directory, cases, scheduling_policy=policy, enable_prefix_cache=prefix,
                  enable_chunked_prefill=chunked, enable_schedule_overlap=overlap, **chunks,
                  **(cache_size if small else {}))
    assert (stats.preemptions_total > 0) == small
    if prefix and not small:
        assert stats.prefix_hits_total > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overlap"), [
    ("llama", True), ("llama", False), ("qwen3 moe", True), ("deepseek v3", True)])
def test_graph_mode(checkpoint, name, overlap):
    directory, cases = checkpoint(name)
    stats = check(directory, cases, enable_graph=True, graph_batch_sizes=(1, 4, 8), enable_schedule_overlap=overlap,
                  **EVERYTHING_ON)
    assert stats.graph_misses_total > 0, "16 sequences decode together, and the largest graph holds 8"


# The real model, over HTTP

SMOL_TOKENS = 24
CHUNKED = ("--max-tokens-per-chunk-for-prefill", "256", "--max-tokens-per-batch", "1024")
SMALL = ("--max-cache-size", "73MiB", "--prefill-scheduling-memory-usage-threshold", "1.0")
LARGE = ("--max-cache-size", "1GiB")
ALL_COMBINATIONS = list(itertools.product(POLICIES, *[(True, False)] * 3, (False, True), (False, True)))
FEW_COMBINATIONS = [("decode_first", True, True, True, False, True)]


@pytest.fixture(scope="module")
def smollm2():
    """(directory, cases of a count of prompts)"""
    directory = resolve_model("smollm2").path

    @cache
    def cases(count):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return reference(model, make_prompts(AutoTokenizer.from_pretrained(directory), count), SMOL_TOKENS)

    return directory, cases


def check_over_http(smollm2, tmp_path, combination, count):
    policy, prefix, chunked, overlap, graph, small = combination
    directory, make_cases = smollm2
    cases = make_cases(count)
    flags = ["--dtype", "float32", "--max-model-len", "1600", "--num-threads", "2", "--scheduling-policy", policy,
             f"--enable-prefix-cache={prefix}", f"--enable-chunked-prefill={chunked}",
             f"--enable-schedule-overlap={overlap}", f"--enable-graph={graph}", *(CHUNKED if chunked else ()),
             *(SMALL if small else LARGE), *(("--graph-batch-sizes", "1,4,16") if graph else ())]
    with ServerProcess(directory, tmp_path, *flags) as server:
        answers = ask_server(server.url, cases, SMOL_TOKENS)
        metrics = server.metrics()
    assert differences(cases, answers) == []
    assert metrics["kv_cache_usage_perc"] == 0
    return metrics


@pytest.mark.model
@pytest.mark.multiprocess
@pytest.mark.parametrize("combination", FEW_COMBINATIONS, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_over_http(smollm2, tmp_path, combination):
    check_over_http(smollm2, tmp_path, combination, count=8)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.multiprocess
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("combination", ALL_COMBINATIONS, ids=lambda c: "-".join(map(str, c)))
def test_smollm2_over_http_in_every_combination(smollm2, tmp_path, combination):
    metrics = check_over_http(smollm2, tmp_path, combination, count=64)
    if combination[-1]:
        assert metrics["num_preemptions_total"] > 0
