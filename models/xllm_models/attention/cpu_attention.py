"""Attention on the CPU: decode reads the paged cache in place, prefill multiplies matrices in slices of queries.

One team of threads writes the step's keys and values and then decodes all one-token rows (cpu_kernels). A prefill row's
keys and values are gathered from the cache; two products and a fused masked softmax a slice are two to three times
faster than torch's flash kernel, which on a CPU without matrix tiles multiplies small blocks.
A float16 cache is for models that compute in float32 (registry.build_model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from xllm_models.attention import cpu_kernels, cpu_prefill
from xllm_models.attention.base import AttentionBackend, AttentionSpec, LayerAttention, NewCache
from xllm_models.forward_input import AttentionMetadata
from xllm_models.ops.cpu_numeric import BFLOAT16, FLOAT16, FLOAT32
from xllm_models.ops.cpu_team import float_bits, run

_ENCODINGS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_QUERY_SLICE = 128  # queries whose scores exist at once
_EXACT_KEYS = 512  # up to so many keys, scores are not rounded to bfloat16
_WARM_BLOCKS = 8  # blocks whose memory is committed at start


class CpuAttention(AttentionBackend):
    features = frozenset({"softcap", "sinks"})

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.dtype not in _ENCODINGS:
            raise ValueError(f"the CPU attention stores float32, bfloat16 or float16, not {spec.dtype}")
        self.spec = spec
        self.key_caches: list[torch.Tensor] = []  # [blocks, K, E, block_size] a layer
        self.value_caches: list[torch.Tensor] = []  # [blocks, K, block_size, E] a layer
        self._warm_blocks = 0
        self._metadata: AttentionMetadata | None = None
        self._slots = self._table = self._lengths = torch.empty(0)
        self._tile = next((t for t in (128, 64, 32, 16) if spec.block_size % t == 0), spec.block_size)
        self._threads = 0
        self._parts = self._part_rows = torch.empty(0)

    @classmethod
    def kv_bytes_per_block(cls, spec: AttentionSpec) -> int:
        return 2 * spec.num_layers * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize

    def allocate_kv_caches(self, num_blocks: int, new_cache: NewCache | None = None) -> None:
        spec, make = self.spec, new_cache or untouched_zeros
        self._warm_blocks = 0 if new_cache else _WARM_BLOCKS
        keys = (num_blocks, spec.num_kv_heads, spec.head_dim, spec.block_size)
        values = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        self.key_caches = [make(keys, spec.dtype) for _ in range(spec.num_layers)]
        self.value_caches = [make(values, spec.dtype) for _ in range(spec.num_layers)]

    def warmup(self) -> None:
        """Commit the memory of the first blocks, which the first requests would otherwise wait for."""
        for cache in (*self.key_caches, *self.value_caches):
            cache[: self._warm_blocks].zero_()

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._slots = metadata.slot_mapping.contiguous()
        self._table = metadata.block_table.contiguous()
        self._lengths = metadata.seq_lens.contiguous()
        threads = torch.get_num_threads()
        if threads != self._threads:  # room for the parts of rows that are cut between threads
            groups = self.spec.num_heads // self.spec.num_kv_heads
            self._threads = threads
            self._parts = torch.empty(2 * threads, groups, self.spec.head_dim + 2)
            self._part_rows = torch.empty(2 * threads, dtype=torch.int64)

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "prepare comes before forward"
        query, key, value = _same_strides(query, key, value)
        out = query.new_empty(query.shape)
        self._write_and_decode(metadata, layer, query, key, value, out)
        if metadata.num_prefills:
            starts, lengths = metadata.query_start_host.tolist(), metadata.seq_lens_host.tolist()
            for row in range(metadata.num_decodes, len(lengths)):
                tokens = slice(starts[row], starts[row + 1])
                self._prefill(layer, row, lengths[row], query[tokens], out[tokens])
        return out.flatten(1)

    def _write_and_decode(
        self, metadata: AttentionMetadata, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, out: torch.Tensor,
    ) -> None:
        spec, keys, values = self.spec, self.key_caches[layer.layer], self.value_caches[layer.layer]
        encoding = _ENCODINGS[query.dtype]
        assert (encoding == BFLOAT16) == (spec.dtype == torch.bfloat16), "queries and cache disagree about bfloat16"
        run(cpu_kernels.step.address, self._threads,
            encoding, key.data_ptr(), value.data_ptr(), query.stride(0), self._slots.data_ptr(), query.shape[0],
            keys.data_ptr(), values.data_ptr(), keys.shape[0], spec.num_kv_heads, spec.head_dim, spec.block_size,
            metadata.num_decodes, self._table.data_ptr(), self._table.shape[1], self._lengths.data_ptr(),
            float_bits(layer.scale), layer.sliding_window, spec.num_heads, self._parts.data_ptr(),
            self._part_rows.data_ptr(), self._tile, query.data_ptr(), out.data_ptr(), _ENCODINGS[spec.dtype],
            float_bits(layer.softcap), *_sinks(layer))

    def _prefill(self, layer: LayerAttention, row: int, length: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """query and out [n, H, E]: slices of queries against all the keys they see, cached ones and their own alike.

        The heads of a group are rows of one product with their common keys. The softmax is float32, and so are the
        scores of short contexts; those of long ones are bfloat16 if the model is, as in other implementations, because
        their product takes a third of the time.
        """
        spec, (n, heads, size) = self.spec, query.shape
        kv_heads, groups = spec.num_kv_heads, heads // spec.num_kv_heads
        start = length - n  # position of the first query
        first = max(0, start - layer.sliding_window + 1) if layer.sliding_window else 0
        keys, values = self._gather(layer.layer, row, first, length)
        grouped = query.view(n, kv_heads, groups, size).permute(1, 0, 2, 3).contiguous()  # [K, n, G, E]
        for begin in range(0, n, _QUERY_SLICE):
            end = min(begin + _QUERY_SLICE, n)
            low = max(0, start + begin - layer.sliding_window + 1 - first) if layer.sliding_window else 0
            high = start + end - first
            part, seen = grouped[:, begin:end].reshape(kv_heads, -1, size), keys[:, :, low:high]
            if high - low <= _EXACT_KEYS:
                part, seen = part.float(), seen.float()
            scores = torch.bmm(part, seen)  # [K, queries * G, keys]
            self._soften(scores, groups, end - begin, start + begin - first - low, layer)
            attended = torch.bmm(scores.to(values.dtype), values[:, low:high]).view(kv_heads, end - begin, groups, size)
            out[begin:end].view(end - begin, kv_heads, groups, size).copy_(attended.permute(1, 0, 2, 3))

    def _soften(self, scores: torch.Tensor, groups: int, queries: int, before: int, layer: LayerAttention) -> None:
        """Masked softmax in place; `before`: keys before the first query's own."""
        keys = scores.shape[2]
        scratch = torch.empty(self._threads, keys)
        run(cpu_prefill.soften_chunk.address, self._threads, _ENCODINGS[scores.dtype], scores.data_ptr(),
            scores.shape[0] * scores.shape[1], keys, scratch.data_ptr(), self._threads, groups, queries, before,
            layer.sliding_window, float_bits(layer.scale), float_bits(layer.softcap), *_sinks(layer))

    def _gather(self, layer: int, row: int, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions first..length-1 of a row, in the compute dtype: keys [K, E, length - first], values transposed."""
        spec, cache = self.spec, self.key_caches[layer]
        dtype = torch.bfloat16 if spec.dtype == torch.bfloat16 else torch.float32
        keys = torch.empty(spec.num_kv_heads, spec.head_dim, length - first, dtype=dtype)
        values = torch.empty(spec.num_kv_heads, length - first, spec.head_dim, dtype=dtype)
        blocks = self._table[row]
        run(cpu_prefill.gather.address, self._threads, _ENCODINGS[spec.dtype], cache.data_ptr(),
            self.value_caches[layer].data_ptr(), cache.shape[0], spec.num_kv_heads, spec.head_dim, spec.block_size,
            blocks.data_ptr(), blocks.shape[0], length, first, keys.data_ptr(), values.data_ptr())
        return keys, values

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        for source, target in pairs.tolist():
            for cache in (*self.key_caches, *self.value_caches):
                cache[target] = cache[source]


def _sinks(layer: LayerAttention) -> tuple[int, int]:
    """(address, number)"""
    return (0, 0) if layer.sinks is None else (layer.sinks.data_ptr(), layer.sinks.numel())


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system commits when they are first written; torch.zeros writes them all at once."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(tuple(shape))


def _same_strides(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts with whole heads next to each other and one distance between tokens, copied only if they are not."""
    head_dim = parts[0].shape[2]
    fine = all(t.stride(2) == 1 and t.stride(1) == head_dim and t.stride(0) == parts[0].stride(0) for t in parts)
    if fine:
        return parts
    packed = torch.cat(parts, dim=1)
    return packed.split([t.shape[1] for t in parts], dim=1)
