"""The part of FlashInfer's interface that the backend uses, in plain torch: same arguments, layouts and life cycle.

`plan` takes the host's page tables and keeps them; `run` reads them from the wrapper's buffers. Those of a wrapper made
for graphs are the caller's and must be large enough, and its batch size is fixed. Names and defaults are those of
flashinfer-python 0.7.
"""

from __future__ import annotations

import torch
from xllm_models.attention.base import LayerAttention
from xllm_models.attention.torch_attention import attend


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self.plans = 0

    def _keep(self, query_start, indptr, indices, last_page_len, sizes, options) -> None:
        assert indptr.device.type == "cpu", "a plan is made on the host"
        assert {t.dtype for t in (query_start, indptr, indices, last_page_len)} == {torch.int32}
        assert int(indptr[-1]) == indices.numel()
        self._query_start, self._indptr, self._indices, self._last = query_start, indptr, indices, last_page_len
        self._heads, self._kv_heads, self._head_dim, self._page_size = sizes
        assert bool((last_page_len >= 1).all() and (last_page_len <= self._page_size).all())
        self._layer = LayerAttention(0, options.pop("sm_scale"), options.pop("window_left") + 1,
                                     options.pop("logits_soft_cap") or 0.0)
        self._dtype = options.pop("q_data_type")
        assert options.pop("kv_data_type") == self._dtype
        assert not options
        self.plans += 1

    def _run(self, q, paged_kv_cache, out):
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert q.dtype == keys.dtype == self._dtype
        assert q.shape == (int(self._query_start[-1]), self._heads, self._head_dim)
        assert keys.shape[1:] == (self._page_size, self._kv_heads, self._head_dim)
        out = torch.empty_like(q) if out is None else out
        for row in range(self._last.numel()):
            pages = self._indices[int(self._indptr[row]) : int(self._indptr[row + 1])].long()
            length = (pages.numel() - 1) * self._page_size + int(self._last[row])
            mine = slice(int(self._query_start[row]), int(self._query_start[row + 1]))
            of_row = (cache[pages].flatten(0, 1)[:length] for cache in (keys, values))
            out[mine] = attend(q[mine], *of_row, self._layer).to(q.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    made: list[BatchDecodeWithPagedKVCacheWrapper] = []

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.graph = use_cuda_graph
        self._buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        assert use_cuda_graph == all(buffer is not None for buffer in self._buffers)
        self.made.append(self)

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
             pos_encoding_mode="NONE", **options) -> None:
        assert pos_encoding_mode == "NONE"
        if self.graph:
            assert last_page_len.numel() == self._buffers[2].numel(), "the batch size of a graph is fixed"
            for buffer, values in zip(self._buffers, (indptr, indices, last_page_len)):
                buffer[: values.numel()].copy_(values)
            indptr, last_page_len = self._buffers[0].clone(), self._buffers[2]
            indices = self._buffers[1][: int(indptr[-1])]
        rows = torch.arange(last_page_len.numel() + 1, dtype=torch.int32)
        self._keep(rows, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size), options)

    def run(self, q, paged_kv_cache, *, out=None):
        return self._run(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, *, causal=False, **options) -> None:
        assert causal
        self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                   (num_qo_heads, num_kv_heads, head_dim_qk, page_size), options)

    def run(self, q, paged_kv_cache, *, out=None):
        return self._run(q, paged_kv_cache, out)
