"""The reference attention backend: plain torch, any device, every case by one code path.

K and V lie as [blocks, block_size, K, E] a layer. Each row's keys are gathered through its block table and attended
in float32 with an explicit mask. Slow and obviously right; other backends are compared with it.
"""

from __future__ import annotations

from functools import partial

import torch

from xllm_models.attention.base import AttentionBackend, AttentionSpec, LayerAttention, NewCache, zeros
from xllm_models.forward_input import AttentionMetadata


class TorchAttention(AttentionBackend):
    features = frozenset({"softcap", "sinks"})

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.key_caches: list[torch.Tensor] = []  # [blocks, block_size, K, E] a layer
        self.value_caches: list[torch.Tensor] = []
        self._metadata: AttentionMetadata | None = None

    @classmethod
    def kv_bytes_per_block(cls, spec: AttentionSpec) -> int:
        values = 2 * spec.num_layers * spec.block_size * spec.num_kv_heads * spec.head_dim
        return values * spec.dtype.itemsize

    def allocate_kv_caches(self, num_blocks: int, new_cache: NewCache | None = None) -> None:
        spec = self.spec
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        make = new_cache or partial(zeros, spec.device)
        self.key_caches, self.value_caches = ([make(shape, spec.dtype) for _ in range(spec.num_layers)] for _ in "kv")

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "prepare comes before forward"
        keys, values = self.key_caches[layer.layer], self.value_caches[layer.layer]
        self.write(layer.layer, key, value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts, lengths = metadata.query_start_host.tolist(), metadata.seq_lens_host.tolist()
        for row, (begin, end, length) in enumerate(zip(starts, starts[1:], lengths)):
            blocks = metadata.block_table[row, : -(-length // self.spec.block_size)].long()
            row_keys, row_values = (cache[blocks].flatten(0, 1)[:length] for cache in (keys, values))
            out[begin:end] = attend(query[begin:end], row_keys, row_values, layer).to(query.dtype)
        return out.flatten(1)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [T, K, E] to the step's slots."""
        assert self._metadata is not None
        for caches, new in ((self.key_caches, key), (self.value_caches, value)):
            caches[layer].view(-1, *new.shape[1:])[self._metadata.slot_mapping] = new.to(self.spec.dtype)

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        for source, target in pairs.tolist():
            for cache in (*self.key_caches, *self.value_caches):
                cache[target] = cache[source]


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
    """query [n, H, E] (the last n positions), keys and values [length, K, E] -> [n, H, E] float32."""
    n, length, groups = query.shape[0], keys.shape[0], query.shape[1] // keys.shape[1]
    keys, values = (t.float().repeat_interleave(groups, dim=1) for t in (keys, values))
    scores = torch.einsum("qhe,khe->hqk", query.float(), keys) * layer.scale
    at = torch.arange(length - n, length, device=query.device)[:, None]  # positions of the queries
    of = torch.arange(length, device=query.device)[None, :]
    hidden = of > at
    if layer.sliding_window:
        hidden = hidden | (of <= at - layer.sliding_window)
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is None:
        return torch.einsum("hqk,khe->qhe", scores.softmax(-1), values)
    scores = torch.cat((scores, layer.sinks.view(-1, 1, 1).expand(-1, n, 1)), dim=-1)
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1)[..., :-1], values)
