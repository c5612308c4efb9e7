"""Batches with several adapters, and rows without one, answer as models whose weights the adapters were added to."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.support.lora import ALL, PHI3, lora_loop, make_adapter, merged_answers, run_loop
from tests.support.tiny_model import make_tiny_model

NEW_TOKENS = 20
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


@pytest.mark.parametrize("name", TARGETS)
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
