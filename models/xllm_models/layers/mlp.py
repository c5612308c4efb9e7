"""The gated MLP, cut over tensor-parallel ranks."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn

from xllm_models.config import ModelConfig
from xllm_models.layers.linear import FusedColumnLinear, RowLinear
from xllm_models.layers.sharding import Shard
from xllm_models.placement import Placement


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, shard: Shard, width: int = 0, **kind: object) -> None:
        """`width`: the intermediate size, where it is not the configuration's."""
        super().__init__()
        self.ops: ModuleType = kind["ops"]  # type: ignore[assignment]
        self.activation = self.ops.ACTIVATIONS[config.hidden_act]
        width, group = width or config.intermediate_size, shard.group
        self.gate_up = FusedColumnLinear(config.hidden_size, [
            ("gate_proj", width, group.rank, group.size),
            ("up_proj", width, group.rank, group.size),
        ], config.mlp_bias, stored_as="gate_up_proj" if config.gate_up_fused else "", **kind)  # type: ignore[arg-type]
        self.down = RowLinear(width, config.hidden_size, config.mlp_bias, group, **kind)  # type: ignore[arg-type]

    def placements(self, prefix: str) -> dict[str, Placement]:
        return self.gate_up.placements(prefix) | self.down.placements(f"{prefix}down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.act_and_mul(self.gate_up(x), self.activation))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand of `forward`'s result."""
        return self.down.partial(self.ops.act_and_mul(self.gate_up(x), self.activation))
