"""The operators on NVIDIA GPUs: torch's own kernels. Import-safe without a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from xllm_models.ops import torch_moe, torch_ops
from xllm_models.ops.torch_ops import (
    ACTIVATIONS,
    act_and_mul,
    linear,
    linear_packed,
    norm_and_rotate,
    pack_linear,
    rotary,
    route,
)

__all__ = ["ACTIVATIONS", "act_and_mul", "add_rms_norm", "linear", "linear_packed", "moe_experts", "norm_and_rotate",
           "pack_linear", "rms_norm", "rotary", "route"]


ALL_EXPERTS_ROWS = 256  # rows up to which all experts are computed for all of them, without waiting for the device


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype != x.dtype:
        return torch_ops.rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def moe_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, first_expert: int = 0, gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    every = x.shape[0] <= ALL_EXPERTS_ROWS or torch.cuda.is_current_stream_capturing()
    compute = torch_moe.moe_experts_of_all if every else torch_moe.moe_experts
    return compute(x, ids, weights, gate_up, down, activation, first_expert, gate_up_bias, down_bias)
