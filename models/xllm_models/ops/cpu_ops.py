"""The operators on the CPU: fused row kernels, and matrices packed for oneDNN.

float32 and bfloat16 only: float16 matrix products are hundreds of times slower on CPUs, so models asked for in
float16 compute in float32 (see registry.build_model). Inside torch.compile the row operators are the reference ones,
which the compiler fuses itself. Measured with SmolLM2-135M's shapes: packing makes a product 1.4 to 3.4 times faster
at 1 to 16 rows in both dtypes and never slower above; the packing hint of 16 rows is as good as the true count.
"""

from __future__ import annotations

import torch

from xllm_models.ops import cpu_kernels, torch_ops
from xllm_models.ops.cpu_moe import moe_experts
from xllm_models.ops.cpu_numeric import BFLOAT16, FLOAT32
from xllm_models.ops.cpu_team import float_bits, run
from xllm_models.ops.torch_ops import ACTIVATIONS, linear, route, token_bitmask

__all__ = ["ACTIVATIONS", "act_and_mul", "add_rms_norm", "linear", "linear_packed", "moe_experts", "norm_and_rotate",
           "pack_linear", "rms_norm", "rotary", "route", "token_bitmask"]

_ENCODINGS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_KINDS = {"silu": cpu_kernels.SILU, "gelu": cpu_kernels.GELU, "gelu_tanh": cpu_kernels.GELU_TANH}
_ONE_THREAD = 4096  # values below which waking the other threads costs more than they give
_PACK_ROWS = 16

_rms_norm = cpu_kernels.rms_norm.address
_add_rms_norm = cpu_kernels.add_rms_norm.address
_act_and_mul = cpu_kernels.act_and_mul.address
_rotary = cpu_kernels.rotary.address
_norm_and_rotate = cpu_kernels.norm_and_rotate.address
_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def _threads(values: int) -> int:
    return 1 if values < _ONE_THREAD else torch.get_num_threads()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if torch.compiler.is_compiling() or not x.is_contiguous():
        return torch_ops.rms_norm(x, weight, eps)
    rows, width = x.shape
    out = torch.empty_like(x)
    run(_rms_norm, _threads(x.numel()), _ENCODINGS[x.dtype], x.data_ptr(), out.data_ptr(), weight.data_ptr(), rows,
        width, float_bits(eps), _ENCODINGS[weight.dtype])
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.compiler.is_compiling() or not (x.is_contiguous() and residual.is_contiguous()):
        return torch_ops.add_rms_norm(x, residual, weight, eps)
    rows, width = x.shape
    run(_add_rms_norm, _threads(x.numel()), _ENCODINGS[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
        rows, width, float_bits(eps), _ENCODINGS[weight.dtype])
    return x, residual


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
    if torch.compiler.is_compiling() or not qkv.is_contiguous():
        return torch_ops.rotary(qkv, positions, cos_sin, num_heads, num_kv_heads, q_norm, k_norm, eps)
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    q_address, k_address, norm_width, encoding = 0, 0, 0, _ENCODINGS[qkv.dtype]
    if q_norm is not None and k_norm is not None:
        q_address, k_address, norm_width = q_norm.data_ptr(), k_norm.data_ptr(), head_dim
        encoding = _ENCODINGS[q_norm.dtype]
    run(_rotary, _threads(qkv.numel()), _ENCODINGS[qkv.dtype], qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(),
        qkv.shape[0], num_heads, num_kv_heads, head_dim, cos_sin.shape[0], cos_sin.shape[1], q_address, k_address,
        norm_width, float_bits(eps), encoding)
    return qkv


def norm_and_rotate(
    x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, eps: float
) -> torch.Tensor:
    if torch.compiler.is_compiling() or not x.is_contiguous():
        return torch_ops.norm_and_rotate(x, weight, positions, cos_sin, eps)
    run(_norm_and_rotate, _threads(x.numel()), _ENCODINGS[x.dtype], x.data_ptr(), weight.data_ptr(),
        positions.data_ptr(), cos_sin.data_ptr(), x.shape[0], weight.shape[0], cos_sin.shape[0], cos_sin.shape[1],
        float_bits(eps))
    return x


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    if torch.compiler.is_compiling() or not x.is_contiguous():
        return torch_ops.act_and_mul(x, activation)
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    run(_act_and_mul, _threads(x.numel()), _ENCODINGS[x.dtype], x.data_ptr(), out.data_ptr(), rows, width,
        _KINDS[activation])
    return out


def pack_linear(weight: torch.Tensor) -> torch.Tensor | None:
    if _linear_pointwise is None or weight.dtype not in _ENCODINGS:
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None  # neither AVX-512 nor the like
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS)


def linear_packed(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[misc]
