"""Products of int8 matrices in plain torch: the reference of what devices fuse.

A matrix is quantised once, with one scale an output; activations as they come, with one scale a token, symmetric.
"""

from __future__ import annotations

import torch

INT8_MAX = 127


def dynamic_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (int8 [T, K], scale [T] float32), so that their product is x rounded to 255 steps."""
    scale = x.float().abs().amax(-1) / INT8_MAX
    steps = torch.round(x.float() / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))
    return steps.to(torch.int8), scale


def pack_quantized(weight: torch.Tensor) -> torch.Tensor:
    """weight int8 [N, K] as checkpoints have it -> what `quant_matmul` takes."""
    return weight.t().contiguous()


def quant_matmul(
    x: torch.Tensor, x_scale: torch.Tensor, packed: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x int8 [T, K], x_scale [T] float32, packed int8 [K, N], weight_scale [N] float32 -> [T, N] in `dtype`."""
    product = x.double() @ packed.double()  # exact: integers below 2**53
    return (product * x_scale.double().unsqueeze(-1) * weight_scale.double()).to(dtype)
