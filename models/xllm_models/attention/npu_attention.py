"""Attention on Ascend NPUs: CANN's fused inference attention over the paged cache, one call for every kind of row.

Caches are [blocks, block_size, K, E]; the operator sees them as [blocks, block_size, K * E]. Queries go in TND layout
with cumulative query lengths and each row's key length; sparse_mode 3 is causal, 4 a band (sliding window). Its mask
is a constant 2048 x 2048 upper triangle, whatever the lengths. Import-safe; calling needs torch_npu.

The operator takes lengths as host lists. In a graph it is a task that every replay updates with the step's lists; it
writes to outputs of the graph and works in a workspace taken before the capture, which all layers and graphs share
because they run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xllm_models.attention.base import LayerAttention
from xllm_models.attention.torch_attention import TorchAttention
from xllm_models.forward_input import AttentionMetadata

_MASK_SIZE = 2048  # what the operator expects for sparse modes 3 and 4
_CAUSAL, _BAND = 3, 4
_NO_LIMIT = 2147483647


class NpuAttention(TorchAttention):
    features = frozenset()
    dtypes = frozenset((torch.float16, torch.bfloat16))
    capture_safe = True
    host_lengths = True
    slot_dtype = torch.int32
    _mask: torch.Tensor | None = None
    _workspace: torch.Tensor | None = None
    _slots: torch.Tensor | None = None
    _query_ends: list[int]
    _key_lengths: list[int]

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._slots = metadata.slot_mapping.to(torch.int32)  # what the write operator takes
        self._query_ends = metadata.query_start_host[1:].tolist()
        self._key_lengths = metadata.seq_lens_host.tolist()
        if self._mask is None:
            square = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.int8, device=self.spec.device)
            self._mask = torch.triu(square, diagonal=1)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        torch.ops.npu.npu_scatter_pa_kv_cache(key.contiguous(), value.contiguous(), self.key_caches[layer],
                                              self.value_caches[layer], self._slots, cache_mode="Norm")

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "prepare comes before forward"
        self.write(layer.layer, key, value)
        query, table = query.contiguous(), metadata.block_table
        if self.graph_tasks is not None:
            return self._in_graph(layer, query, table).flatten(1)
        arguments, options = self._call(layer, query, table)
        return torch.ops.npu.npu_fused_infer_attention_score_v2(*arguments, **options)[0].flatten(1)

    def _call(
        self, layer: LayerAttention, query: torch.Tensor, table: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """The operator's arguments, with the lengths of the step that was prepared last."""
        spec, windowed = self.spec, layer.sliding_window > 0
        caches = (self.key_caches[layer.layer].flatten(2), self.value_caches[layer.layer].flatten(2))
        return (query, *caches), {
            "atten_mask": self._mask, "actual_seq_qlen": self._query_ends, "actual_seq_kvlen": self._key_lengths,
            "block_table": table, "num_query_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
            "softmax_scale": layer.scale, "input_layout": "TND", "block_size": spec.block_size,
            "sparse_mode": _BAND if windowed else _CAUSAL,
            "pre_tokens": layer.sliding_window - 1 if windowed else _NO_LIMIT,  # keys before the query's own
            "next_tokens": 0 if windowed else _NO_LIMIT}

    def _in_graph(self, layer: LayerAttention, query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        assert self.graph_tasks is not None
        workspace = self._enough_workspace(layer, query, table)

        def attend(tensors: Sequence[torch.Tensor]) -> None:
            query, out, lse = tensors
            arguments, options = self._call(layer, query, table)
            torch.ops.npu.npu_fused_infer_attention_score_v2.out(*arguments, workspace=workspace, out=[out, lse],
                                                                 **options)

        out = torch.empty_like(query)
        self.graph_tasks.launch(attend, (query, out, query.new_empty(1, dtype=torch.float32)))
        return out

    def _enough_workspace(self, layer: LayerAttention, query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """What the operator needs at most for as many rows, asked for outside of captures and kept."""
        if not torch.npu.is_current_stream_capturing():  # type: ignore[attr-defined]
            arguments, options = self._call(layer, query, table)
            found = torch.ops.npu._npu_fused_infer_attention_score_v2_get_max_workspace(*arguments, **options)
            if self._workspace is None or found.numel() > self._workspace.numel():
                self._workspace = found  # graphs that were captured with the old one keep it
        assert self._workspace is not None, "a capture is preceded by a run of the same input"
        return self._workspace
