"""RMS norms and the three ways in which a checkpoint's weight becomes a factor.

plain: the weight, in the model's dtype, applied after rounding. plus_one: 1 + weight; float32: the weight; both are
kept in float32, whatever the model's dtype, and applied before rounding.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn

from xllm_models.layers.linear import empty_parameter
from xllm_models.placement import Placement


class RMSNorm(nn.Module):
    def __init__(
        self, width: int, eps: float, norm: str = "plain", *, ops: ModuleType, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.eps, self.norm, self.ops = eps, norm, ops
        self.weight = norm_weight(width, norm, dtype, device)

    def placements(self, name: str) -> dict[str, Placement]:
        return {f"{name}.weight": norm_placement(self.weight, self.norm)}

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), [T, hidden] both; the first norm of a model has no residual yet."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


def norm_weight(width: int, norm: str, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    weight = empty_parameter((width,), dtype if norm == "plain" else torch.float32, device)
    weight.exact = norm != "plain"  # type: ignore[attr-defined]  # not rounded to the storage dtype
    return weight


def norm_placement(weight: nn.Parameter, norm: str) -> Placement:
    def store(part: torch.Tensor) -> None:
        weight.data.copy_(part.float() + 1)

    return Placement(weight, tuple(weight.shape), store=store if norm == "plus_one" else None)
