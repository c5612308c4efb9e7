"""The one place that binds a device to its operators and attention backends, by name.

A platform names its operator set and its attention backends in `Capabilities`; a third party registers its own with
`register_ops` and `register_attention`. Targets are "module:attribute" strings, imported at first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from xllm_models.attention.base import AttentionBackend, PagedBackend
from xllm_models.attention.mla_base import MlaBackend
from xllm_models.config import ModelConfig

_OPS = {
    "torch": "xllm_models.ops.torch_ops",
    "cpu": "xllm_models.ops.cpu_ops",
    "npu": "xllm_models.ops.npu_ops",
    "cuda": "xllm_models.ops.cuda_ops",
}
_ATTENTION = {
    "torch": "xllm_models.attention.torch_attention:TorchAttention",
    "numba": "xllm_models.attention.cpu_attention:CpuAttention",
    "npu": "xllm_models.attention.npu_attention:NpuAttention",
    "cuda": "xllm_models.attention.cuda_attention:CudaAttention",
    "triton": "xllm_models.attention.triton_attention:TritonAttention",
    "flashinfer": "xllm_models.attention.flashinfer_attention:FlashInferAttention",
}
# Latent attention, under the same names; where one has none, torch's serves.
_MLA_ATTENTION = {
    "torch": "xllm_models.attention.torch_mla:TorchMla",
    "numba": "xllm_models.attention.cpu_mla:CpuMla",
    "triton": "xllm_models.attention.triton_attention:TritonMla",
}


class UnknownBackendError(ValueError):
    """No operator set or attention backend of this name; the message lists those there are."""


def register_ops(name: str, module: str) -> None:
    """`module` has the functions of xllm_models.ops.torch_ops."""
    _OPS[name] = module


def register_attention(name: str, target: str) -> None:
    """`target` is "module:Class" of an AttentionBackend whose constructor takes an AttentionSpec."""
    _ATTENTION[name] = target


def register_mla_attention(name: str, target: str) -> None:
    """`target` is "module:Class" of an MlaBackend whose constructor takes an MlaSpec."""
    _MLA_ATTENTION[name] = target


def get_ops(name: str) -> ModuleType:
    return importlib.import_module(_find(_OPS, name, "operator set"))


def get_attention(name: str) -> type[AttentionBackend]:
    return _load(_find(_ATTENTION, name, "attention backend"))


def get_mla_attention(name: str) -> type[MlaBackend]:
    if name in _ATTENTION and name not in _MLA_ATTENTION:
        name = "torch"
    return _load(_find(_MLA_ATTENTION, name, "attention backend"))


def attention_for(config: ModelConfig, name: str) -> type[PagedBackend]:
    """The backend of this name for what the model caches: keys and values, or latents."""
    return get_attention(name) if config.mla is None else get_mla_attention(name)


def falls_back(config: ModelConfig, name: str) -> bool:
    """Whether `attention_for` gives torch's because the one of this name knows no latents."""
    return config.mla is not None and name not in _MLA_ATTENTION


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _find(registry: dict[str, str], name: str, kind: str) -> str:
    if name not in registry:
        raise UnknownBackendError(f"There is no {kind} {name!r}; known: {', '.join(sorted(registry))}.")
    return registry[name]
