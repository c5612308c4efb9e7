"""Attention by this project's Triton kernels, over the same cache as the reference's: paged decode and paged prefill.

Lengths, block tables and slots are read from device memory, so a captured graph needs nothing from the host.
Import-safe; making a backend needs a Triton that compiles for the device.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.attention.mla_base import MlaSpec
from xllm_models.attention.torch_attention import TorchAttention
from xllm_models.attention.torch_mla import TorchMla
from xllm_models.forward_input import AttentionMetadata

_SMALLEST_BLOCK = 16  # tokens: a tile of keys lies in one block


class BlockSizeError(ValueError):
    """The kernels cannot read blocks of this size."""


class TritonAttention(TorchAttention):
    features = frozenset({"softcap", "sinks"})
    capture_safe = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        _check_block_size(spec.block_size)
        self._store, self._decode, self._prefill = (_kernels(name) for name in ("kv_store", "paged_decode",
                                                                                "paged_prefill"))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert self._metadata is not None
        dtype = self.spec.dtype
        self._store.kv_store(key.to(dtype), value.to(dtype), self.key_caches[layer], self.value_caches[layer],
                             self._metadata.slot_mapping)

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "prepare comes before forward"
        self.write(layer.layer, key, value)
        caches = self.key_caches[layer.layer], self.value_caches[layer.layer]
        kind = {"scale": layer.scale, "window": layer.sliding_window, "softcap": layer.softcap, "sinks": layer.sinks}
        decodes = metadata.num_decodes
        if not metadata.num_prefills:
            return self._decode.paged_decode(query, *caches, metadata.block_table, metadata.seq_lens, **kind).flatten(1)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if decodes:
            out[:decodes] = self._decode.paged_decode(
                query[:decodes], *caches, metadata.block_table[:decodes], metadata.seq_lens[:decodes], **kind)
        # Query offsets count from the step's first token, so all of query and out go along.
        self._prefill.paged_prefill(query, *caches, metadata.block_table[decodes:], metadata.query_start[decodes:],
                                    metadata.seq_lens[decodes:], **kind, out=out)
        return out.flatten(1)


class TritonMla(TorchMla):
    """Decodes read the latents as they lie, with absorbed projections; prompts are the reference's, in torch."""

    capture_safe = True

    def __init__(self, spec: MlaSpec) -> None:
        super().__init__(spec)
        _check_block_size(spec.block_size)
        self._store, self._decode = _kernels("kv_store"), _kernels("mla_decode")

    def write(self, layer: int, latent: torch.Tensor) -> None:
        assert self._metadata is not None
        self._store.latent_store(latent.to(self.spec.dtype), self.caches[layer], self._metadata.slot_mapping)

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, latent: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "prepare comes before forward"
        decodes = metadata.num_decodes
        self.write(layer.layer, latent)
        if not metadata.num_prefills:
            return self._absorbed(layer, query, up, metadata).flatten(1)
        out = query.new_empty(query.shape[0], self.spec.num_heads, self.spec.value_size)
        if decodes:
            out[:decodes] = self._absorbed(layer, query[:decodes], up, metadata)
        self.attend_rows(layer, query, up, out, first_row=decodes)
        return out.flatten(1)

    def _absorbed(
        self, layer: LayerAttention, query: torch.Tensor, up: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """query [D, H, R + P] of the decodes -> [D, H, V]."""
        spec, rows = self.spec, query.shape[0]
        keys_up, values_up = up.split((spec.nope_size, spec.value_size), dim=1)  # [H, P, C], [H, V, C]
        rotated, nope = query.split((spec.rope_size, spec.nope_size), dim=2)
        latent_query = torch.bmm(nope.transpose(0, 1), keys_up).transpose(0, 1)  # [D, H, C]
        found = self._decode.mla_decode(latent_query.contiguous(), rotated.contiguous(), self.caches[layer.layer],
                                        metadata.block_table[:rows], metadata.seq_lens[:rows], layer.scale)
        return torch.bmm(found.transpose(0, 1), values_up.transpose(1, 2)).transpose(0, 1)


def _check_block_size(block_size: int) -> None:
    if block_size % _SMALLEST_BLOCK:
        raise BlockSizeError(f"The Triton attention reads tiles of {_SMALLEST_BLOCK} keys that lie in one block: set "
                             f"--block_size to a multiple of {_SMALLEST_BLOCK}, not {block_size}.")


def _kernels(module: str) -> ModuleType:
    return importlib.import_module(f"xllm_kernels_npu.{module}")
