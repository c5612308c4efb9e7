"""The operators on Ascend NPUs: torch_npu's fused ones, this project's Triton kernels where it has none, else torch's.

Importing needs no torch_npu; calling an operator does (importing torch_npu is what registers torch.ops.npu).
"""

from __future__ import annotations

import torch

from xllm_models.ops import npu_moe, torch_moe, torch_ops
from xllm_models.ops.npu_moe import route
from xllm_models.ops.npu_quant import dynamic_quant, pack_quantized, quant_matmul
from xllm_models.ops.torch_ops import ACTIVATIONS, linear, linear_packed, norm_and_rotate, pack_linear
from xllm_models.ops.triton_kernels import load as _kernel

__all__ = ["ACTIVATIONS", "act_and_mul", "add_rms_norm", "dynamic_quant", "linear", "linear_packed", "moe_experts",
           "norm_and_rotate", "pack_linear", "pack_quantized", "quant_matmul", "rms_norm", "rotary", "rotary_pairs",
           "route", "token_bitmask", "top_k_top_p"]


ALL_EXPERTS_ROWS = 256  # rows up to which all experts are computed for all of them, without waiting for the device


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype != x.dtype:  # npu_rms_norm takes one type
        kernel = _kernel("rms_norm")
        return torch_ops.rms_norm(x, weight, eps) if kernel is None else kernel.rms_norm(x, weight, eps)
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if weight.dtype != x.dtype:
        kernel = _kernel("add_rms_norm")
        add = torch_ops.add_rms_norm if kernel is None else kernel.add_rms_norm
        return add(x, residual, weight, eps)
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
        kernel = _kernel("rotary")
        turn = torch_ops.rotary if kernel is None else kernel.rotary
        return turn(qkv, positions, cos_sin, num_heads, num_kv_heads, q_norm, k_norm, eps)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query.contiguous(), q_norm, eps), rms_norm(key.contiguous(), k_norm, eps)
    cos, sin = cos_sin[positions].to(qkv.dtype).view(1, num_tokens, 1, rotary_dim).chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)  # "half" mode wants [1, T, 1, E]
    query = torch.ops.npu.npu_rotary_mul(query.contiguous(), cos, sin)
    key = torch.ops.npu.npu_rotary_mul(key.contiguous(), cos, sin)
    return torch.cat((query, key, value), dim=2).view(num_tokens, -1)


def rotary_pairs(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, E], of each head the pairs (2i, 2i + 1) rotated; positions [T]; cos_sin [P, E] -> like x."""
    cos, sin = cos_sin[positions].to(x.dtype).chunk(2, dim=-1)
    cos, sin = (part.repeat_interleave(2, dim=-1).view(1, x.shape[0], 1, -1) for part in (cos, sin))
    return torch.ops.npu.npu_rotary_mul(x.unsqueeze(0).contiguous(), cos, sin, rotary_mode="interleave")[0]


def top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """logits [B, V]; top_k [B] int32 of 1..1024; top_p [B] of 0..1 -> logits, those that are filtered out -inf.

    Of the top_k best, those are kept that the better ones leave short of top_p of their mass.
    """
    return torch.ops.npu.npu_top_k_top_p(logits, top_p.to(logits.dtype), top_k)


def token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    kernel = _kernel("token_bitmask")
    (torch_ops if kernel is None else kernel).token_bitmask(logits, bitmask, rows)


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation != "silu":
        return torch_ops.act_and_mul(x, activation)
    return torch.ops.npu.npu_swiglu(x)


def moe_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, first_expert: int = 0, gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if activation == "silu" and gate_up_bias is None and down_bias is None:
        return npu_moe.moe_experts(x, ids, weights, gate_up, down, first_expert)
    every = x.shape[0] <= ALL_EXPERTS_ROWS or torch.npu.is_current_stream_capturing()  # type: ignore[attr-defined]
    compute = torch_moe.moe_experts_of_all if every else torch_moe.moe_experts
    return compute(x, ids, weights, gate_up, down, activation, first_expert, gate_up_bias, down_bias)
