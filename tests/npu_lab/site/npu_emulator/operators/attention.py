"""Fused inference attention, both versions and all its forms: plain, `.out`, the workspace, the shape of the output.

Modelled: TND and BSH layouts over a paged cache, sparse modes 0 (no mask), 3 (causal, right-aligned) and 4 (a band,
right-aligned). The device takes half precision only; NPU_LAB_FLOAT32=1 lets float32 through, for comparisons of tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from npu_emulator.registry import FLOATS, HALF, npu_operator, require, require_dtype, require_shape

MASK = 2048  # rows and columns of the constant mask of sparse modes 3 and 4
NO_LIMIT = 2147483647


@dataclass
class Call:
    """One call, its arguments named as in version 2."""

    query: torch.Tensor  # TND [T, N, D]; BSH [B, S, N * D]
    key: torch.Tensor  # [blocks, block_size, K * D]
    value: torch.Tensor
    mask: torch.Tensor | None
    query_lengths: list[int] | None  # TND: running sums
    key_lengths: list[int]
    block_table: torch.Tensor | None  # [B, blocks a row] int32
    num_heads: int
    num_kv_heads: int
    scale: float
    layout: str
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    block_size: int

    def check(self) -> None:
        allowed = FLOATS if os.environ.get("NPU_LAB_FLOAT32") == "1" else HALF
        require_dtype("query", self.query, *allowed)
        require(self.key.dtype == self.value.dtype == self.query.dtype, "query, key and value differ in dtype")
        require(self.layout in ("TND", "BSH"), f"input_layout {self.layout!r} is not modelled")
        require(self.num_heads % self.num_kv_heads == 0, "the heads do not divide by the key-value heads")
        self._check_cache()
        self._check_lengths()
        require(self.sparse_mode in (0, 3, 4), f"sparse_mode {self.sparse_mode} is not modelled")
        if self.sparse_mode in (3, 4):
            _check_mask(self.mask)
        else:
            require(self.mask is None, "sparse_mode 0 with a mask is not modelled")
        if self.sparse_mode == 4:
            require(self.pre_tokens >= 0 and self.next_tokens >= 0, "a band that leaves out the query's own position")

    def _check_cache(self) -> None:
        table, width = self.block_table, self.num_kv_heads * self.head_dim
        require(table is not None, "attention without a paged cache is not modelled")
        assert table is not None
        require_dtype("block_table", table, torch.int32)
        require(self.block_size > 0 and self.block_size % 16 == 0 and self.block_size <= 512,
                f"block_size {self.block_size} is no multiple of 16 up to 512")
        for name, cache in (("key", self.key), ("value", self.value)):
            require_shape(name, cache, self.key.shape[0], self.block_size, width)
            require(cache.is_contiguous(), f"{name} is not contiguous")
        require(table.dim() == 2 and table.shape[0] == len(self.key_lengths), "block_table needs a row a sequence")
        for row, length in zip(table, self.key_lengths):
            used = -(-length // self.block_size)
            require(used <= table.shape[1], f"{length} keys need {used} blocks, and a row has {table.shape[1]}")
            require(((row[:used] >= 0) & (row[:used] < self.key.shape[0])).all(), "block_table names no such block")

    def _check_lengths(self) -> None:
        require(all(length >= 0 for length in self.key_lengths), "a negative key length")
        if self.layout == "BSH":
            require(self.query.dim() == 3 and self.query.shape[0] == len(self.key_lengths), "a key length a sequence")
            return
        ends = self.query_lengths
        require(self.query.dim() == 3 and self.query.shape[1] == self.num_heads, "TND's query is [T, heads, D]")
        require(ends is not None and len(ends) == len(self.key_lengths), "TND needs as many query as key lengths")
        assert ends is not None
        require(all(a <= b for a, b in zip([0, *ends], ends)), f"query lengths {ends} are not running sums")
        require(ends[-1] == self.query.shape[0], f"the last query end {ends[-1]} is not T, {self.query.shape[0]}")

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1] if self.layout == "TND" else self.query.shape[-1] // self.num_heads

    def run(self) -> torch.Tensor:
        """Like query."""
        self.check()
        assert self.block_table is not None
        query = self.query if self.layout == "TND" else self.query.reshape(-1, self.num_heads, self.head_dim)
        steps = self.query.shape[1]
        ends = self.query_lengths if self.layout == "TND" else [steps * (i + 1) for i in range(self.query.shape[0])]
        assert ends is not None
        out = torch.zeros_like(query)
        for begin, end, length, row in zip([0, *ends], ends, self.key_lengths, self.block_table):
            blocks = row[: -(-length // self.block_size)].long()
            keys, values = (cache[blocks].view(-1, self.num_kv_heads, self.head_dim)[:length]
                            for cache in (self.key, self.value))
            out[begin:end] = self._attend(query[begin:end], keys, values).to(out.dtype)
        return out.view(self.query.shape)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """query [n, N, D], keys and values [m, K, D] -> [n, N, D] float32; rows that see nothing are 0."""
        groups = self.num_heads // self.num_kv_heads
        keys, values = (t.float().repeat_interleave(groups, dim=1) for t in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * self.scale
        scores = scores.masked_fill(~self._seen(query.shape[0], keys.shape[0]), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), values)

    def _seen(self, queries: int, keys: int) -> torch.Tensor:
        """[queries, keys] bool. The last query is at the last key's position."""
        distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
        if self.sparse_mode == 3:
            return distance <= 0
        if self.sparse_mode == 4:
            return (distance <= self.next_tokens) & (distance >= -self.pre_tokens)
        return torch.ones(queries, keys, dtype=torch.bool)


def _check_mask(mask: torch.Tensor | None) -> None:
    require(mask is not None, "sparse modes 3 and 4 need atten_mask")
    assert mask is not None
    require_dtype("atten_mask", mask, torch.int8, torch.uint8, torch.bool)
    require_shape("atten_mask", mask, MASK, MASK)
    rows = torch.tensor([0, 1, MASK // 2, MASK - 1])
    wanted = torch.arange(MASK) > rows[:, None]
    require(torch.equal(mask[rows].bool(), wanted), "atten_mask is not 1 above the diagonal and 0 elsewhere")


def _refuse(rest: dict[str, Any]) -> None:
    used = [name for name, value in rest.items() if value not in (None, 0, False) and name != "inner_precise"]
    require(not used, f"{', '.join(used)}: not modelled")


@npu_operator("npu_fused_infer_attention_score")
def attention(
    query, key, value, *, atten_mask=None, actual_seq_lengths=None, actual_seq_lengths_kv=None, block_table=None,
    num_heads=1, scale=1.0, pre_tokens=NO_LIMIT, next_tokens=NO_LIMIT, input_layout="BSH", num_key_value_heads=0,
    sparse_mode=0, block_size=0, softmax_lse_flag=False, **rest,
):
    _refuse(rest)
    require(not softmax_lse_flag, "softmax_lse_flag is not modelled")
    require(actual_seq_lengths_kv is not None, "attention over a paged cache needs actual_seq_lengths_kv")
    call = Call(query, key, value, atten_mask, actual_seq_lengths, list(actual_seq_lengths_kv), block_table, num_heads,
                num_key_value_heads or num_heads, scale, input_layout, sparse_mode, pre_tokens, next_tokens, block_size)
    return call.run(), torch.zeros(1)


@npu_operator("npu_fused_infer_attention_score_v2")
def attention_v2(
    query, key, value, *, atten_mask=None, actual_seq_qlen=None, actual_seq_kvlen=None, block_table=None,
    num_query_heads=1, num_key_value_heads=0, softmax_scale=1.0, pre_tokens=NO_LIMIT, next_tokens=NO_LIMIT,
    input_layout="BSH", sparse_mode=0, block_size=0, return_softmax_lse=False, **rest,
):
    _refuse(rest)
    require(not return_softmax_lse, "return_softmax_lse is not modelled")
    require(actual_seq_kvlen is not None, "attention over a paged cache needs actual_seq_kvlen")
    call = Call(query, key, value, atten_mask, actual_seq_qlen, list(actual_seq_kvlen), block_table, num_query_heads,
                num_key_value_heads or num_query_heads, softmax_scale, input_layout, sparse_mode, pre_tokens,
                next_tokens, block_size)
    return call.run(), torch.zeros(1)


def _into(out: Any, found: torch.Tensor) -> Any:
    require(len(out) == 2 and out[0].shape == found.shape and out[0].dtype == found.dtype,
            "out is not [like query, softmax's log-sum-exp]")
    out[0].copy_(found)
    return tuple(out)


@npu_operator("npu_fused_infer_attention_score.out")
def attention_out(query, key, value, *, workspace=None, out, **rest):
    require(workspace is not None, "`.out` without a workspace allocates one, which a graph cannot hold")
    return _into(out, attention(query, key, value, **rest)[0])


@npu_operator("npu_fused_infer_attention_score_v2.out")
def attention_v2_out(query, key, value, *, workspace=None, out, **rest):
    require(workspace is not None, "`.out` without a workspace allocates one, which a graph cannot hold")
    return _into(out, attention_v2(query, key, value, **rest)[0])


@npu_operator("_npu_fused_infer_attention_score_infer_output")
def attention_output(query, value, **rest):
    return torch.empty_like(query), torch.empty(1)


@npu_operator("_npu_fused_infer_attention_score_v2_infer_output")
def attention_v2_output(query, value, **rest):
    return torch.empty_like(query), torch.empty(1)


@npu_operator("_npu_fused_infer_attention_score_get_max_workspace")
def attention_workspace(query, key, value, **rest):
    return torch.empty(1024, dtype=torch.uint8)


@npu_operator("_npu_fused_infer_attention_score_v2_get_max_workspace")
def attention_v2_workspace(query, key, value, **rest):
    return torch.empty(1024, dtype=torch.uint8)
