"""Architectures without a network of ours run through transformers' code and give the tokens of its `generate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine import run_engine
from tests.support.greedy import ask_server, differences, reference
from tests.support.hf_model import ARCHITECTURES, make_hf_model
from tests.support.server import ServerProcess

NEW_TOKENS = 24
FEW = {"gpt2", "cohere2", "olmoe", "gpt_bigcode", "mimo_v2_flash", "vaultgemma"}  # one of each peculiarity
OFF = {"enable_prefix_cache": False, "enable_chunked_prefill": False, "enable_schedule_overlap": False,
       "max_tokens_per_batch": 1024}
ON = {"max_tokens_per_chunk_for_prefill": 24, "max_tokens_per_batch": 64, "max_model_len": 208,
      "prefill_scheduling_memory_usage_threshold": 1.0}
BLOCKS = 15  # of 16 tokens, the dummy included: two long sequences do not fit


def prompts() -> list[list[int]]:
    """Of 1 to 100 tokens; half share a beginning."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 60).tolist()
    return [rng.integers(0, 256, n).tolist() for n in (1, 30, 46, 95)] + [
        shared + rng.integers(0, 256, n).tolist() for n in (1, 3, 19, 35)]


def make_cases(directory):
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return reference(model, prompts(), NEW_TOKENS)


def check(directory, cases, **settings):
    answers, loop = run_engine(directory, [c.prompt for c in cases], NEW_TOKENS, model_impl="transformers", **settings)
    assert differences(cases, answers) == []
    assert loop.ready.implementation == "transformers"
    return loop


@pytest.mark.parametrize("model_type", [
    pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in ARCHITECTURES])
def test_every_architecture(tmp_path, model_type):
    """Everything off; then chunks, prefix cache, overlap and a cache so small that sequences are preempted."""
    directory = make_hf_model(tmp_path / "m", model_type)
    cases = make_cases(directory)
    ready = check(directory, cases, **OFF).ready
    block_bytes = ready.kv_cache_bytes // (ready.num_kv_blocks + 1)
    stats = check(directory, cases, max_cache_size=BLOCKS * block_bytes, **ON).scheduler.stats
    assert stats.preemptions_total > 0
    assert stats.prefix_hits_total > 0


@pytest.mark.multiprocess
@pytest.mark.slow
def test_over_http(tmp_path):
    directory = make_hf_model(tmp_path / "m", "gpt2")
    cases = make_cases(directory)
    with ServerProcess(directory, tmp_path, "--dtype", "float32", "--max-tokens-per-batch", "64") as server:
        answers = ask_server(server.url, cases, NEW_TOKENS)
        told = server.stderr
    assert differences(cases, answers) == []
    assert "Network: transformers' modelling code" in told
    assert "Weights of rank 0: " in told
