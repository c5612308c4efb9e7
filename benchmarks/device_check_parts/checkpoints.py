"""Tiny random checkpoints, prompts, and what torch's operators answer to them on the CPU in float32."""

from __future__ import annotations

import random
from pathlib import Path

import own_tests  # noqa: F401
import torch
from paged_decoder import PagedDecoder, load_model
from xllm_platform.cpu.device import CpuPlatform

from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_tokenizer import VOCAB

BLOCK_SIZE = 16
LONGEST = 384
# What each adds to the one before: head norms; experts; soft caps and windows; sinks; latent attention.
ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3")


def make(folder: Path, architecture: str) -> Path:
    return make_tiny_model(folder / architecture, architecture)


def prompts(count: int = 5, longest: int = 200) -> list[list[int]]:
    draw = random.Random(3)
    lengths = [longest, 1, 17, 16, *(draw.randrange(2, longest) for _ in range(count))][:count]
    return [[draw.randrange(VOCAB - 4) for _ in range(length)] for length in lengths]


def reference(directory: Path, asked: list[list[int]], steps: int) -> list[list[int]]:
    platform = CpuPlatform()
    model = load_model(platform, directory, torch.float32, kernels="torch")
    decoder = PagedDecoder(platform, model, "torch", rows=len(asked), longest=LONGEST, block_size=BLOCK_SIZE)
    return decoder.greedy(asked, steps)


def difference(found: list[list[int]], expected: list[list[int]]) -> str:
    """Where they part first; "" if they do not."""
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
            return f"prompt {row} differs from token {at} of {len(theirs)} on: {ours[at]} instead of {theirs[at]}"
    return ""
