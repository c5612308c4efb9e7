"""Which implementation runs a model, and its weights: what loading does with settings and checkpoint, on any device.

What cannot be served as asked is refused with a message that says which setting to change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from xllm_models.config import ModelConfig
from xllm_models.encoder import EncoderModel, checkpoint_prefix
from xllm_models.pooling_config import PoolingWish
from xllm_models.registry import read_model_config
from xllm_models.weights.dummy_source import DummySource
from xllm_models.weights.loader import Progress, load_weights, num_parameters
from xllm_models.weights.renamed_source import with_prefix
from xllm_models.weights.source import WeightSource, open_source

from xllm_npu.config.settings import Settings
from xllm_npu.state.messages import WeightLoad


class LoadError(RuntimeError):
    """The model cannot be served as asked; the message is for the user."""


def read_config(settings: Settings, path: Path) -> ModelConfig:
    """The checkpoint's configuration as the implementation that the settings choose reads it."""
    m = settings.model
    wish = PoolingWish(m.runner, m.convert, _object(m.pooler_config), _object(m.hf_overrides), m.enable_qwen3_reranker)
    config = read_model_config(path, m.model_impl, wish)
    if config.pooling is not None:
        _check_pooling(settings, config)
    if config.implementation == "transformers":
        _check_transformers(settings, config)
    return config


def _object(text: str) -> dict[str, Any]:
    return json.loads(text) if text.strip() else {}


def _check_pooling(settings: Settings, config: ModelConfig) -> None:
    """What a model that gives vectors cannot be asked for."""
    assert config.pooling is not None
    what = f"{config.pooling.architecture} gives vectors"
    if settings.lora.enable_lora:
        raise LoadError(f"{what}, which LoRA adapters do not change in this version: turn enable_lora off.")
    if settings.execution.enable_graph:
        raise LoadError(f"{what} and has no decode steps, which graphs are captured of: turn enable_graph off.")
    if config.encoder is None:
        return
    if settings.parallel.tp_size > 1:
        raise LoadError(f"{what} and is not cut over devices: set --tp_size 1, not {settings.parallel.tp_size}. Copies "
                        "of the whole model are possible with --dp_size.")
    if settings.kv_cache.enable_vmm_kvcache or settings.kv_cache.enable_vmm_weights:
        raise LoadError(f"{what}, keeps no KV cache, and its weights are not put into virtual memory: leave "
                        "--enable_vmm_kvcache and --enable_vmm_weights (sleep mode) out.")


def _check_transformers(settings: Settings, config: ModelConfig) -> None:
    through = f"{config.architecture} runs through transformers' code (--model_impl)"
    for name, value in (("tp_size", settings.parallel.tp_size), ("ep_size", settings.parallel.ep_size)):
        if value > 1:
            raise LoadError(f"{through}, which is not cut over devices: set --{name} 1, not {value}. Copies of the "
                            "whole model are possible with --dp_size.")
    if settings.lora.enable_lora:
        raise LoadError(f"{through}, which takes no LoRA adapters: turn enable_lora off.")
    if settings.execution.enable_graph:
        raise LoadError(f"{through}, which is not captured in graphs: turn enable_graph off.")


def load_model_weights(
    settings: Settings, model: torch.nn.Module, path: Path, rank: int, progress: Progress
) -> WeightLoad:
    """Fill `model` from the files, or with dummy weights. Raises WeightError."""
    source: WeightSource
    if settings.model.load_format == "dummy":
        source = DummySource(model.placements(), max(settings.execution.random_seed, 0))  # type: ignore[operator]
    else:
        source = open_weights(model, path)
    report = load_weights(model, source, progress)  # type: ignore[arg-type]
    return WeightLoad(rank, report.bytes, report.seconds, report.peak_bytes, num_parameters(source))


def open_weights(model: torch.nn.Module, path: Path) -> WeightSource:
    """The files, by the names that `model` gives its weights. Raises WeightError."""
    source = open_source(path)
    if isinstance(model, EncoderModel):
        return with_prefix(source, checkpoint_prefix(source.tensors), "")
    if "embed_tokens.weight" in source.tensors:  # saved without a head, and so without the network's name
        return with_prefix(source, "", "model.")
    return source
