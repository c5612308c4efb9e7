"""Attention both ways over whole prompts that lie packed behind each other; nothing is cached.

Neighbours of equal length are attended together. `block_diagonal` is the plain form: one product over all tokens under
a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from xllm_models.attention.base import NewCache, PagedBackend
from xllm_models.forward_input import AttentionMetadata

Bias = Callable[[int], torch.Tensor]  # n -> [H, n, n], added to the scores of a sequence of n tokens


class EncoderAttention(PagedBackend):
    def __init__(self, spec: Any = None) -> None:
        super().__init__(spec)
        self.runs: list[tuple[int, int]] = []  # (tokens of each, how many): sequences in their order

    @classmethod
    def kv_bytes_per_block(cls, spec: Any) -> int:
        return 0

    @classmethod
    def num_kv_caches(cls, spec: Any) -> int:
        return 0

    def allocate_kv_caches(self, num_blocks: int, new_cache: NewCache | None = None) -> None:
        """There are none."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        lengths = (metadata.query_start_host[1:] - metadata.query_start_host[:-1]).tolist()
        self.runs = [(length, sum(1 for _ in same)) for length, same in groupby(lengths)]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """There are none."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, bias: Bias | None = None
    ) -> torch.Tensor:
        """query, key, value [T, H, E] -> [T, H*E]."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        begin = 0
        for length, count in self.runs:
            end = begin + length * count
            q, k, v = (t[begin:end].unflatten(0, (count, length)).transpose(1, 2) for t in (query, key, value))
            mask = None if bias is None else bias(length)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)  # [count, H, length, E]
            out[begin:end] = found.transpose(1, 2).flatten(0, 1)
            begin = end
        if begin < query.shape[0]:
            out[begin:] = 0  # padding
        return out.flatten(1)


def block_diagonal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float,
    bias: Bias | None = None,
) -> torch.Tensor:
    """The same, as one masked product: query, key, value [T, H, E] -> [T, H*E]."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    scores = torch.einsum("qhe,khe->hqk", query.float(), key.float()) * scale
    if bias is not None:
        begin = 0
        for n in lengths:
            scores[:, begin : begin + n, begin : begin + n] += bias(n)
            begin += n
    scores = scores.masked_fill(owner[:, None] != owner[None, :], float("-inf"))
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1), value.float()).to(query.dtype).flatten(1)
