"""The operators on NVIDIA GPUs: this project's Triton kernels where Triton is installed, else torch's. Import-safe.

A kernel multiplies by a norm's weight before it rounds, where the reference rounds first unless the weight is float32.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from xllm_models.ops import torch_moe, torch_ops, triton_kernels
from xllm_models.ops.torch_ops import ACTIVATIONS, linear, linear_packed, norm_and_rotate, pack_linear, route

__all__ = ["ACTIVATIONS", "act_and_mul", "add_rms_norm", "linear", "linear_packed", "moe_experts", "norm_and_rotate",
           "pack_linear", "rms_norm", "rotary", "route", "token_bitmask"]


ALL_EXPERTS_ROWS = 256  # rows up to which all experts are computed for all of them, without waiting for the device


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)  # one kernel of torch's
    kernel = _kernel("rms_norm", x)
    return torch_ops.rms_norm(x, weight, eps) if kernel is None else kernel.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = _kernel("add_rms_norm", x)
    if kernel is not None:
        return kernel.add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    kernel = _kernel("rotary", qkv)
    turn = torch_ops.rotary if kernel is None else kernel.rotary
    return turn(qkv, positions, cos_sin, num_heads, num_kv_heads, q_norm, k_norm, eps)


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    kernel = _kernel("swiglu", x) if activation == "silu" else None
    return torch_ops.act_and_mul(x, activation) if kernel is None else kernel.swiglu(x)


def moe_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, first_expert: int = 0, gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    every = x.shape[0] <= ALL_EXPERTS_ROWS or torch.cuda.is_current_stream_capturing()
    compute = torch_moe.moe_experts_of_all if every else torch_moe.moe_experts
    return compute(x, ids, weights, gate_up, down, activation, first_expert, gate_up_bias, down_bias)


def token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    kernel = _kernel("token_bitmask", logits)
    (torch_ops if kernel is None else kernel).token_bitmask(logits, bitmask, rows)


def _kernel(module: str, x: torch.Tensor) -> ModuleType | None:
    """The kernels of a module for tensors where `x` is; None without Triton, and on the CPU."""
    return triton_kernels.load(module) if x.is_cuda else None
