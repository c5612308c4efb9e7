"""Where each expert is while places move: from the router's expert to one of its copies' places, and how busy each is.

Places are numbered over all ranks: expert-parallel rank * places a rank + place. Tensors keep their addresses, so a
captured graph sees every change.
"""

from __future__ import annotations

import torch
from torch import nn


class ExpertPlaces(nn.Module):
    table: torch.Tensor
    copies: torch.Tensor
    load: torch.Tensor

    def __init__(self, num_experts: int, ranks: int, slots: int, device: torch.device) -> None:
        super().__init__()
        self.slots = slots
        here = num_experts // ranks
        home = torch.arange(num_experts).div(here, rounding_mode="floor") * slots + torch.arange(num_experts) % here
        self.register_buffer("table", home.unsqueeze(1).repeat(1, ranks).to(device), persistent=False)  # [E, R] int64
        self.register_buffer("copies", torch.ones(num_experts, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)

    def update(self, placement: list[list[int]]) -> None:
        """placement [R][S]: the expert in each place, below 0 for none."""
        places: list[list[int]] = [[] for _ in range(self.copies.shape[0])]
        for rank, row in enumerate(placement):
            for slot, expert in enumerate(row):
                if expert >= 0:
                    places[expert].append(rank * self.slots + slot)
        width = self.table.shape[1]
        rows = [(found * width)[:width] for found in places]
        self.table.copy_(torch.tensor(rows))
        self.copies.copy_(torch.tensor([len(found) for found in places]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Experts [T, k] int32, -1 for none -> places [T, k] int32. Row t takes copy t modulo their number; counts."""
        some, experts = ids >= 0, ids.clamp(min=0).long()
        self.load.scatter_add_(0, experts.flatten(), some.flatten().long())
        copy = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) % self.copies[experts]
        return torch.where(some, self.table[experts, copy], -1).to(torch.int32)
