"""Attention on NVIDIA GPUs by FlashInfer: its paged decode and paged prefill over the same cache as the reference's.

FlashInfer plans a step on the host (how work is split over multiprocessors) and runs that plan in every layer; layers
that differ in window, soft cap or scale have plans of their own, made for those kinds that were seen. A decode step
that is replayed as a graph has wrappers of its own batch size: their plans are rewritten in the memory that the graph
reads, so `prepare` before each replay is all it takes. Import-safe; calling needs the package `flashinfer`.

Page tables as FlashInfer wants them: `indptr` [B+1] (pages before each row), `indices` [pages] (the rows' blocks, one
after the other), `last_page_len` [B] (1..block_size). Source: docs.flashinfer.ai, "KV-Cache Layout".
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.attention.torch_attention import TorchAttention
from xllm_models.forward_input import AttentionMetadata

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
_TENSOR_CORE_GROUP = 4  # query heads of one key head from which decode is faster on tensor cores


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that share a plan."""

    scale: float
    window_left: int  # positions before the query's own that it sees; -1: all
    softcap: float

    @classmethod
    def of(cls, layer: LayerAttention) -> _Kind:
        return cls(layer.scale, layer.sliding_window - 1 if layer.sliding_window else -1, layer.softcap)


@dataclass(slots=True)
class _Pages:
    """Page tables of some rows: host arrays for the plan, block numbers on the device."""

    indptr: torch.Tensor  # [B+1] int32, host
    last_page_len: torch.Tensor  # [B] int32, host
    indices: torch.Tensor  # [pages] int32, device


class FlashInferAttention(TorchAttention):
    features = frozenset({"softcap"})
    dtypes = frozenset((torch.float16, torch.bfloat16))
    head_sizes = frozenset((64, 128, 256))
    capture_safe = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._library = importlib.import_module("flashinfer")
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._kinds: list[_Kind] = []
        self._decode: dict[_Kind, Any] = {}  # the step's wrappers, planned
        self._prefill: dict[_Kind, Any] = {}
        self._eager_decode: dict[_Kind, Any] = {}
        self._eager_prefill: dict[_Kind, Any] = {}
        self._graph_decode: dict[tuple[int, _Kind], Any] = {}  # by batch size
        self._decode_pages: _Pages | None = None
        self._prefill_pages: _Pages | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        decodes, rows = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
        self._decode_pages = self._pages(0, decodes) if decodes else None
        self._prefill_pages = self._pages(decodes, rows) if metadata.num_prefills else None
        self._decode, self._prefill = {}, {}
        for kind in self._kinds:
            self._plan(kind)

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        metadata, kind = self._metadata, _Kind.of(layer)
        assert metadata is not None, "prepare comes before forward"
        if kind not in self._kinds:  # the first forward of all, which is never captured
            self._kinds.append(kind)
            self._plan(kind)
        self.write(layer.layer, key, value)
        cache = self.key_caches[layer.layer], self.value_caches[layer.layer]
        query, decodes = query.contiguous(), metadata.num_decodes
        if not metadata.num_prefills:
            return self._decode[kind].run(query, cache).flatten(1)
        out = torch.empty_like(query)
        if decodes:
            self._decode[kind].run(query[:decodes], cache, out=out[:decodes])
        self._prefill[kind].run(query[decodes:], cache, out=out[decodes:])
        return out.flatten(1)

    def _plan(self, kind: _Kind) -> None:
        """Of the prepared step, for layers of this kind."""
        spec = self.spec
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size
        options = {"window_left": kind.window_left, "logits_soft_cap": kind.softcap or None, "sm_scale": kind.scale,
                   "q_data_type": spec.dtype, "kv_data_type": spec.dtype}
        if (pages := self._decode_pages) is not None:
            wrapper = self._decode[kind] = self._decode_wrapper(kind, pages)
            wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, *sizes, pos_encoding_mode="NONE", **options)
        if (pages := self._prefill_pages) is not None:
            wrapper = self._prefill[kind] = self._prefill_wrapper(kind)
            wrapper.plan(self._query_starts(), pages.indptr, pages.indices, pages.last_page_len, *sizes, causal=True,
                         **options)

    def _decode_wrapper(self, kind: _Kind, pages: _Pages) -> Any:
        metadata, device = self._metadata, self.spec.device
        assert metadata is not None
        make = self._library.BatchDecodeWithPagedKVCacheWrapper
        tensor_cores = self.spec.num_heads // self.spec.num_kv_heads >= _TENSOR_CORE_GROUP
        if not metadata.as_graph:
            if kind not in self._eager_decode:
                self._eager_decode[kind] = make(self._workspace, "NHD", use_tensor_cores=tensor_cores)
            return self._eager_decode[kind]
        rows, width = metadata.block_table.shape
        if (rows, kind) not in self._graph_decode:

            def buffer(count: int) -> torch.Tensor:
                return torch.zeros(count, dtype=torch.int32, device=device)

            self._graph_decode[rows, kind] = make(
                self._workspace, "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores,
                paged_kv_indptr_buffer=buffer(rows + 1), paged_kv_indices_buffer=buffer(rows * width),
                paged_kv_last_page_len_buffer=buffer(rows))
        return self._graph_decode[rows, kind]

    def _prefill_wrapper(self, kind: _Kind) -> Any:
        if kind not in self._eager_prefill:
            self._eager_prefill[kind] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        return self._eager_prefill[kind]

    def _query_starts(self) -> torch.Tensor:
        """[B+1] int32 of the prefill rows, host."""
        metadata = self._metadata
        assert metadata is not None
        starts = metadata.query_start_host[metadata.num_decodes :]
        return torch.from_numpy(starts - starts[0])

    def _pages(self, begin: int, end: int) -> _Pages:
        metadata, block_size = self._metadata, self.spec.block_size
        assert metadata is not None
        lengths, width = metadata.seq_lens_host[begin:end], metadata.block_table.shape[1]
        counts = -(-lengths // block_size)
        indptr = np.zeros(end - begin + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        # Where in the table [B, M] the rows' pages lie: row r's are its first counts[r] columns.
        firsts = np.arange(begin, end) * width
        place = np.arange(indptr[-1]) + np.repeat(firsts - indptr[:-1], counts)
        picked = torch.from_numpy(place.astype(np.int64)).to(self.spec.device, non_blocking=True)
        last = (lengths - (counts - 1) * block_size).astype(np.int32)
        return _Pages(torch.from_numpy(indptr), torch.from_numpy(last), metadata.block_table.reshape(-1)[picked])
