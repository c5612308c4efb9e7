"""A decode step of transformers' own Llama over its static cache, repeated at one position."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from xllm_platform.base import Platform


def random_model(platform: Platform, directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """With torch's attention; values as in paged_decoder.random_model."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device(platform.device()):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 1:
            parameter.fill_(1)
        else:
            parameter.uniform_(-0.02, 0.02)
    return model


def step(
    platform: Platform, model: torch.nn.Module, batch: int, context: int, graph: bool
) -> Callable[[], torch.Tensor]:
    """A call that decodes token number `context` of each row -> the next tokens, [batch, 1]."""
    device = platform.device()
    cache = StaticCache(config=model.config, max_cache_len=context)
    tokens = torch.full((batch, 1), 7, dtype=torch.int64, device=device)
    position = torch.full((1, 1), context - 1, dtype=torch.int64, device=device)
    named = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with torch.inference_mode():  # the first call allocates the cache
        model(tokens, position_ids=torch.zeros_like(position), use_cache=True, **{named: cache})
    lengths = _shared_lengths(cache)

    def run() -> torch.Tensor:
        lengths.fill_(context - 1)
        out: Any = model(tokens, position_ids=position, use_cache=True, **{named: cache})
        return out.logits.argmax(-1)

    call = torch.inference_mode()(run)
    if not graph:
        return call
    with torch.inference_mode():
        captured = platform.graph_backend().capture(run)
    return torch.inference_mode()(captured.replay)


def _shared_lengths(cache: StaticCache) -> torch.Tensor:
    """[layers] int64: each layer's count of cached tokens, made parts of one tensor so that one call sets them all."""
    counts = [layer.cumulative_length for layer in cache.layers]
    together = torch.zeros(len(counts), dtype=counts[0].dtype, device=counts[0].device)
    for layer, count in zip(cache.layers, together):
        layer.cumulative_length = count
    return together
