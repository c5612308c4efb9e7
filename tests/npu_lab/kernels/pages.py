"""A paged cache with several rows' keys and values in it, as the attention kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.npu_lab.kernels.numbers import random


@dataclass(slots=True)
class Pages:
    """Rows' blocks lie in random order; block 0 and what is past a row's length hold other values, some of them
    infinite, which nobody may read.
    """

    key_cache: torch.Tensor  # [blocks, block_size, ...] on the device
    value_cache: torch.Tensor
    block_table: torch.Tensor  # [B, M] int32
    seq_lens: torch.Tensor  # [B] int32

    @classmethod
    def filled(
        cls, lengths: list[int], block_size: int, token: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pages:
        """`token`: the shape of one token's keys, and of its values."""
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts)) + 1
        table = torch.zeros(len(lengths), max(*counts, 1) + 1, dtype=torch.int32)
        caches = [torch.full((sum(counts) + 1, block_size, *token), torch.inf, dtype=dtype) for _ in "kv"]
        for row, (length, blocks) in enumerate(zip(lengths, order.split(counts))):
            table[row, : len(blocks)] = blocks
            for cache in caches:
                rows = cache[blocks].flatten(0, 1)
                rows[:length] = torch.randn(length, *token).to(dtype)
                cache[blocks] = rows.view(-1, block_size, *token)
        return cls(*(cache.to(device) for cache in caches), table.to(device),
                   torch.tensor(lengths, dtype=torch.int32, device=device))

    def on_host(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.cpu() for tensor in (self.key_cache, self.value_cache, self.block_table, self.seq_lens))


def queries(
    counts: list[int], heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(query [T, H, E], cut from a wider tensor as a model's are; query_start [B + 1] int32) for rows of `counts`."""
    wide = random((sum(counts), (heads + 2) * head_dim), dtype, device)
    start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return wide[:, : heads * head_dim].view(-1, heads, head_dim), start.to(device)
