"""MXFP4: 4-bit floats, two a byte, with one power of two for every 32 of them (OCP Microscaling formats 1.0).

A checkpoint holds a matrix [..., K] as blocks [..., K / 32, 16] uint8, the even element in a byte's low half, and
scales [..., K / 32] uint8, exponents biased by 127.
"""

from __future__ import annotations

import torch

BLOCK = 32
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # sign bit clear; 1 sign, 2 exponent, 1 mantissa bit


def unscaled(blocks: torch.Tensor) -> torch.Tensor:
    """blocks [..., G, 16] uint8 -> the elements without their scales, [..., G * 32] bfloat16 (exact)."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1)
    return pairs.flatten(-3)


def factors(scales: torch.Tensor) -> torch.Tensor:
    """scales [..., G] uint8 -> each element's factor, [..., G * 32] float32."""
    return torch.exp2(scales.float() - _BIAS).repeat_interleave(BLOCK, dim=-1)
