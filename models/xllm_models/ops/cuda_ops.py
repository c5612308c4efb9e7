"""The operators on NVIDIA GPUs: torch's own kernels. Import-safe without a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xllm_models.ops import torch_ops
from xllm_models.ops.torch_ops import (
    ACTIVATIONS,
    act_and_mul,
    linear,
    linear_packed,
    moe_experts,
    norm_and_rotate,
    pack_linear,
    rotary,
    route,
)

__all__ = ["ACTIVATIONS", "act_and_mul", "add_rms_norm", "linear", "linear_packed", "moe_experts", "norm_and_rotate",
           "pack_linear", "rms_norm", "rotary", "route"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype != x.dtype:
        return torch_ops.rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
