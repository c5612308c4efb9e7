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
    return _PAIRS[blocks.int()].view(torch.bfloat16).flatten(-2)


def factors(scales: torch.Tensor) -> torch.Tensor:
    """scales [..., G] uint8 -> each element's factor, [..., G * 32] bfloat16 (exact)."""
    return torch.exp2(scales.float() - _BIAS).bfloat16().repeat_interleave(BLOCK, dim=-1)


def _pairs() -> torch.Tensor:
    """[256] int32: the two elements of a byte, as bfloat16 side by side."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack((low, high), dim=-1).view(torch.int32).squeeze(-1)


_PAIRS = _pairs()
