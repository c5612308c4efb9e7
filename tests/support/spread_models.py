"""Checkpoints that are spread over ranks in every way, and what transformers answers: one of each kind of sharing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from xllm_models.hub import resolve_model

from tests.support.greedy import Case, make_prompts, reference
from tests.support.tiny_model import make_tiny_model

NEW_TOKENS = 24
TINY = {
    "qwen3": {}, "deepseek_v3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
}  # fmt: skip
BLOCKS = 19  # of 16 tokens: a long sequence and a few short ones, so that requests are preempted
# Bytes that a rank's KV cache takes for a block, by how many ranks cut its heads; latents are not cut.
_BLOCK_BYTES = {"qwen3": {1: 8192, 2: 4096}, "qwen3_moe": {1: 8192, 2: 4096}, "deepseek_v3": {1: 4096, 2: 4096}}


class SpreadModels:
    """Made when first asked for, below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.tiny = cache(self._tiny)

    def _tiny(self, name: str) -> tuple[Path, list[Case]]:
        path = make_tiny_model(self._directory / name, name, max_position_embeddings=256, **TINY[name])
        torch.set_num_threads(1)  # threads only wait for each other in a model this small
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        rng = np.random.default_rng(5)
        shared = rng.integers(0, 256, 60).tolist()
        prompts = [(shared if i % 3 == 0 else []) + rng.integers(0, 256, int(n)).tolist()
                   for i, n in enumerate(np.geomspace(1, 140, 32))]
        return path, reference(model, prompts, NEW_TOKENS)

    @cache  # noqa: B019  (lives as long as the tests' module)
    def smollm2(self) -> tuple[Path, list[Case]]:
        path = resolve_model("smollm2").path
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return path, reference(model, make_prompts(AutoTokenizer.from_pretrained(path), 24, longest=700), NEW_TOKENS)


def tight(name: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    """`flags` and those that make a tiny model chunk its prompts and preempt."""
    tp = 2 if "--tp-size 2" in " ".join(flags) else 1
    return (*flags, "--dtype", "float32", "--max-tokens-per-chunk-for-prefill", "24", "--max-tokens-per-batch", "64",
            "--max-cache-size", str(BLOCKS * _BLOCK_BYTES[name][tp]),
            "--prefill-scheduling-memory-usage-threshold", "1.0")
