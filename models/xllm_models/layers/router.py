"""Which experts a token visits, and how much each of them counts."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn

from xllm_models.layers.linear import ParallelLinear
from xllm_models.moe_config import MoeConfig
from xllm_models.placement import Placement
from xllm_models.weight_memory import empty_weight


class Router(nn.Module):
    """Every rank has all of it."""

    correction_bias: torch.Tensor | None

    def __init__(
        self, moe: MoeConfig, hidden_size: int, *, ops: ModuleType, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.moe, self.ops = moe, ops
        self.dtype = torch.float32 if moe.float32_logits else dtype
        self.linear = ParallelLinear(hidden_size, moe.num_experts, moe.bias, ops=ops, dtype=self.dtype, device=device)
        bias = empty_weight((moe.num_experts,), torch.float32, device) if moe.correction_bias else None
        self.register_buffer("correction_bias", bias)  # no parameter: those may be rounded to 16 bits

    def placements(self, name: str, correction_bias: str) -> dict[str, Placement]:
        """`name` of the matrix without ".weight"; `correction_bias` is a whole name."""
        linear, count = self.linear, self.moe.num_experts
        found = {f"{name}.weight": Placement(linear.weight, (count, linear.in_features))}
        if linear.bias is not None:
            found[f"{name}.bias"] = Placement(linear.bias, (count,))
        if self.correction_bias is not None:
            found[correction_bias] = Placement(self.correction_bias, (count,))
        return found

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, N] -> weights [T, k] float32, experts [T, k] int32."""
        logits = self.linear(x.to(self.dtype)).float()
        return self.ops.route(logits, self.moe, self.correction_bias)
