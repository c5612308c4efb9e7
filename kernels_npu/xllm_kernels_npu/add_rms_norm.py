"""Residual sum and RMS norm of it: total = x + residual, out = total * rsqrt(mean(total^2) + eps) * weight.

The norm is of the rounded sum, computed in float32 (arXiv:1910.07467). A vector kernel: each program walks over tiles
of rows, and over each twice, piece by piece where a row does not fit: for the mean, then for the values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel

TILE_VALUES = 2048  # values at once: rows of this width or less are read whole, several of them if they are narrow


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x, residual, weight, out, total, num_rows, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """x, residual, out, total [num_rows, WIDTH], contiguous. `out` may be x's memory and `total` residual's."""
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        place = tl.cast(first, tl.int64) * WIDTH + lane[:, None] * WIDTH + column[None, :]
        rows = (first + lane < num_rows)[:, None]
        squares = tl.zeros([ROWS, TILE], tl.float32)
        for start in range(0, WIDTH, TILE):
            inside = rows & (start + column[None, :] < WIDTH)
            added = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            added += tl.load(residual + place + start, mask=inside, other=0.0).to(tl.float32)
            added = added.to(total.dtype.element_ty).to(tl.float32)
            squares += added * added
        scale = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)
        for start in range(0, WIDTH, TILE):
            inside = rows & (start + column[None, :] < WIDTH)
            added = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            added += tl.load(residual + place + start, mask=inside, other=0.0).to(tl.float32)
            rounded = added.to(total.dtype.element_ty)
            gain = tl.load(weight + start + column[None, :], mask=start + column[None, :] < WIDTH, other=0.0)
            normed = rounded.to(tl.float32) * scale[:, None] * gain.to(tl.float32)
            tl.store(out + place + start, normed.to(out.dtype.element_ty), mask=inside)
            tl.store(total + place + start, rounded, mask=inside)


def tiling(width: int) -> dict[str, int]:
    """The kernel's constexprs for rows of this width."""
    tile = min(TILE_VALUES, triton.next_power_of_2(width))
    return {"WIDTH": width, "TILE": tile, "ROWS": TILE_VALUES // tile}


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., N] float of one dtype, weight [N] float -> (norm [..., N], x + residual [..., N])."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // max(1, x.shape[-1])
    if rows:
        constants = tiling(x.shape[-1])
        programs = vector_programs(x.device, triton.cdiv(rows, constants["ROWS"]))
        add_rms_norm_kernel[(programs,)](x, residual, weight, out, total, rows, eps, **constants)
    return out, total


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm in float32, not rounded; the sum in x's dtype."""
    total = x + residual
    wide = total.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float(), total


def _case(dtype: str, width: int, weight: str = "") -> CompileCase:
    pointers = dict.fromkeys(("x", "residual", "weight", "out", "total"), f"*{dtype}")
    pointers["weight"] = f"*{weight or dtype}"
    return CompileCase(
        f"{dtype}{f' by {weight}' * bool(weight)}, {width} wide",
        {**pointers, "num_rows": "i32", "eps": "fp32"}, tiling(width))


KERNELS = (
    Kernel(
        add_rms_norm_kernel,
        (*(_case(dtype, 4096) for dtype in FLOAT_TYPES), _case("bf16", 576), _case("bf16", 2048), _case("bf16", 7168),
         _case("bf16", 5376, "fp32")),
        ub_budget=144 << 10),
)
