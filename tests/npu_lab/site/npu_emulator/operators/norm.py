"""RMS norms and gated activations. Computed in float32 and rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from npu_emulator.registry import FLOATS, npu_operator, require, require_dtype


@npu_operator("npu_rms_norm")
def rms_norm(input, gamma, epsilon=1e-6):
    """input [..., N], gamma [N] -> ([..., N], reciprocal of the root mean square [..., 1] float32)."""
    require_dtype("input", input, *FLOATS)
    require_dtype("gamma", gamma, input.dtype)
    require(gamma.dim() > 0 and input.shape[-gamma.dim():] == gamma.shape,
            f"gamma {list(gamma.shape)} is not the end of input's shape {list(input.shape)}")
    require(epsilon > 0, f"epsilon is {epsilon}")
    x = input.float()
    reduced = tuple(range(-gamma.dim(), 0))
    scale = torch.rsqrt(x.pow(2).mean(reduced, keepdim=True) + epsilon)
    return (x * scale * gamma.float()).to(input.dtype), scale


@npu_operator("npu_add_rms_norm")
def add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """(norm of x1 + x2, reciprocal, x1 + x2)."""
    require(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 differ in shape or dtype")
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


@npu_operator("npu_swiglu")
def swiglu(input, dim=-1):
    """[..., 2N] -> silu(first half) * second half."""
    require_dtype("input", input, *FLOATS)
    require(input.shape[dim] % 2 == 0, f"dimension {dim} of {list(input.shape)} is odd")
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)
