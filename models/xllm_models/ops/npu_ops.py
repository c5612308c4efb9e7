"""The operators on Ascend NPUs: torch_npu's fused ones where it has them.

Importing needs no torch_npu; calling an operator does (importing torch_npu is what registers torch.ops.npu).
"""

from __future__ import annotations

import torch

from xllm_models.ops import torch_moe, torch_ops
from xllm_models.ops.torch_ops import ACTIVATIONS, linear, linear_packed, norm_and_rotate, pack_linear, route

__all__ = ["ACTIVATIONS", "act_and_mul", "add_rms_norm", "linear", "linear_packed", "moe_experts", "norm_and_rotate",
           "pack_linear", "rms_norm", "rotary", "route"]


ALL_EXPERTS_ROWS = 256  # rows up to which all experts are computed for all of them, without waiting for the device


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype != x.dtype:
        return torch_ops.rms_norm(x, weight, eps)
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if weight.dtype != x.dtype:
        return torch_ops.add_rms_norm(x, residual, weight, eps)
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, total


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
    num_tokens, rotary_dim = qkv.shape[0], cos_sin.shape[1]
    heads = qkv.view(1, num_tokens, num_heads + 2 * num_kv_heads, -1)
    if rotary_dim != heads.shape[-1]:  # npu_rotary_mul turns whole heads only
        return torch_ops.rotary(qkv, positions, cos_sin, num_heads, num_kv_heads, q_norm, k_norm, eps)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query.contiguous(), q_norm, eps), rms_norm(key.contiguous(), k_norm, eps)
    cos, sin = cos_sin[positions].to(qkv.dtype).view(1, num_tokens, 1, rotary_dim).chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)  # "half" mode wants [1, T, 1, E]
    query = torch.ops.npu.npu_rotary_mul(query.contiguous(), cos, sin)
    key = torch.ops.npu.npu_rotary_mul(key.contiguous(), cos, sin)
    return torch.cat((query, key, value), dim=2).view(num_tokens, -1)


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation != "silu":
        return torch_ops.act_and_mul(x, activation)
    return torch.ops.npu.npu_swiglu(x)


def moe_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, first_expert: int = 0, gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    every = x.shape[0] <= ALL_EXPERTS_ROWS or torch.npu.is_current_stream_capturing()  # type: ignore[attr-defined]
    compute = torch_moe.moe_experts_of_all if every else torch_moe.moe_experts
    return compute(x, ids, weights, gate_up, down, activation, first_expert, gate_up_bias, down_bias)
