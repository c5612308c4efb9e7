"""Rotary position embeddings. Angles come as cosines and sines of whole heads, repeated for the second half."""

from __future__ import annotations

import torch
from npu_emulator.registry import FLOATS, npu_operator, require, require_dtype, require_shape


@npu_operator("npu_rotary_mul")
def rotary_mul(input, r1, r2, rotary_mode="half"):
    """input 4-D [.., D]; r1 (cosines), r2 (sines) 4-D [.., D], each dimension before the last 1 or input's."""
    require_dtype("input", input, *FLOATS)
    require(rotary_mode in ("half", "interleave"), f"rotary_mode is {rotary_mode!r}")
    require(input.dim() == 4 and input.shape[-1] % 2 == 0, f"input {list(input.shape)} is not 4-D with an even end")
    for name, r in (("r1", r1), ("r2", r2)):
        require_dtype(name, r, input.dtype)
        fits = r.dim() == 4 and r.shape[-1] == input.shape[-1]
        require(fits and all(a in (1, b) for a, b in zip(r.shape[:-1], input.shape[:-1])),
                f"{name} {list(r.shape)} does not fit input {list(input.shape)}")
    _require_repeated("r1", r1, rotary_mode)
    _require_repeated("r2", r2, rotary_mode)
    x = input.float()
    return (x * r1.float() + _turned(x, rotary_mode) * r2.float()).to(input.dtype)


@npu_operator("npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(query, key, cos, sin, layout="BSND", rotary_mode="half"):
    """query [B, S, N, D], key [B, S, K, D], cos and sin [B, S, 1, D]. Returns new tensors."""
    require(layout == "BSND", f"layout {layout!r} is not modelled")
    require_shape("sin", sin, *cos.shape)
    return rotary_mul(query, cos, sin, rotary_mode), rotary_mul(key, cos, sin, rotary_mode)


@npu_operator("npu_interleave_rope")
def interleave_rope(x, cos, sin):
    """x [B, N, S, 64] with pairs (2i, 2i+1); the result has them as (i, i + 32), rotated."""
    require_dtype("x", x, *FLOATS)
    require(x.dim() == 4 and x.shape[-1] == 64, f"x {list(x.shape)} is not [B, N, S, 64]")
    split = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return rotary_mul(split, cos, sin)


def _turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _require_repeated(name: str, r: torch.Tensor, mode: str) -> None:
    first, second = r.chunk(2, dim=-1) if mode == "half" else (r[..., ::2], r[..., 1::2])
    require(torch.equal(first, second), f"{name} has different angles for the two values of a pair")
