"""Token embedding and output projection, both cut over the vocabulary.

With tied embeddings the projection reads the embedding's matrix; packing makes it a copy of its own, because the
embedding needs rows of the plain one.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn
from xllm_platform.collectives import all_gather, all_reduce
from xllm_platform.parallel import Group

from xllm_models.layers.linear import ParallelLinear, empty_parameter
from xllm_models.placement import Placement


class VocabEmbedding(nn.Module):
    def __init__(
        self, vocab_size: int, hidden_size: int, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, group
        self.weight = empty_parameter((vocab_size // group.size, hidden_size), dtype, device)

    def placements(self, name: str) -> dict[str, Placement]:
        whole = (self.vocab_size, self.weight.shape[1])
        return {f"{name}.weight": Placement(self.weight, whole, (), 0, self.group.rank, self.group.size)}

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> [T, hidden]."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        part = self.weight.shape[0]
        local = token_ids - self.group.rank * part
        elsewhere = (local < 0) | (local >= part)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0), self.group)


class LogitsHead(ParallelLinear):
    def __init__(
        self, vocab_size: int, hidden_size: int, group: Group, tied: nn.Parameter | None, *, ops: ModuleType,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        super().__init__(hidden_size, vocab_size // group.size if tied is None else 0, False, ops=ops, dtype=dtype,
                         device=device)
        self.vocab_size, self.group, self.tied = vocab_size, group, tied is not None
        if tied is not None:
            self.weight, self.out_features = tied, tied.shape[0]

    def placements(self, name: str) -> dict[str, Placement]:
        if self.tied:
            return {}
        whole = (self.vocab_size, self.in_features)
        return {f"{name}.weight": Placement(self.weight, whole, (), 0, self.group.rank, self.group.size)}

    def finalize(self) -> None:
        if self.tied and not self.stays_plain:
            self.packed = self.ops.pack_linear(self.weight)
        elif not self.tied:
            super().finalize()

    def allocate(self) -> None:
        if self.tied:
            self.packed = None
        else:
            super().allocate()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> logits of the whole vocabulary, [S, V] float32."""
        return all_gather(self.apply_weight(hidden), self.group, dim=-1).float()
