"""RMS norm over the last axis: x * rsqrt(mean(x^2) + eps) * weight, computed in float32 (arXiv:1910.07467).

A vector kernel: each program walks over tiles of rows. A row that does not fit a tile is read twice, piece by piece.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel

TILE_VALUES = 4096  # values at once: rows of this width or less are read whole, several of them if they are narrow


@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def rms_norm_kernel(
    x, weight, out, num_rows, row_stride, eps, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """x [num_rows, WIDTH], its rows row_stride values apart; out is contiguous."""
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        source = x + tl.cast(first, tl.int64) * row_stride + lane[:, None] * row_stride
        target = out + tl.cast(first, tl.int64) * WIDTH + lane[:, None] * WIDTH
        rows = (first + lane < num_rows)[:, None]
        if WIDTH <= TILE:
            inside = column[None, :] < WIDTH
            values = tl.load(source + column[None, :], mask=rows & inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
            gain = tl.load(weight + column[None, :], mask=inside, other=0.0).to(tl.float32)
            normed = values * scale[:, None] * gain
            tl.store(target + column[None, :], normed.to(out.dtype.element_ty), mask=rows & inside)
        else:
            squares = tl.zeros([ROWS, TILE], tl.float32)
            for start in range(0, WIDTH, TILE):
                inside = rows & (start + column[None, :] < WIDTH)
                values = tl.load(source + start + column[None, :], mask=inside, other=0.0).to(tl.float32)
                squares += values * values
            scale = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)
            for start in range(0, WIDTH, TILE):
                inside = start + column[None, :] < WIDTH
                values = tl.load(source + start + column[None, :], mask=rows & inside, other=0.0).to(tl.float32)
                gain = tl.load(weight + start + column[None, :], mask=inside, other=0.0).to(tl.float32)
                normed = values * scale[:, None] * gain
                tl.store(target + start + column[None, :], normed.to(out.dtype.element_ty), mask=rows & inside)


def tiling(width: int) -> dict[str, int]:
    """The kernel's constexprs for rows of this width."""
    tile = min(TILE_VALUES, triton.next_power_of_2(width))
    return {"WIDTH": width, "TILE": tile, "ROWS": TILE_VALUES // tile}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., N] float, rows of one stride; weight [N] float -> [..., N] of x's dtype."""
    rows = x.reshape(-1, x.shape[-1])
    constants = tiling(rows.shape[1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.shape[0]:
        programs = vector_programs(x.device, triton.cdiv(rows.shape[0], constants["ROWS"]))
        rms_norm_kernel[(programs,)](rows, weight, out, rows.shape[0], rows.stride(0), eps, **constants)
    return out.view(x.shape)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _case(dtype: str, width: int, weight: str = "") -> CompileCase:
    return CompileCase(
        f"{dtype}{f' by {weight}' * bool(weight)}, {width} wide",
        {"x": f"*{dtype}", "weight": f"*{weight or dtype}", "out": f"*{dtype}", "num_rows": "i32", "row_stride": "i32",
         "eps": "fp32"},
        tiling(width))


KERNELS = (
    Kernel(
        rms_norm_kernel,
        (*(_case(dtype, 4096) for dtype in FLOAT_TYPES), _case("bf16", 128), _case("bf16", 576), _case("bf16", 7168),
         _case("bf16", 5376, "fp32")),
        ub_budget=160 << 10),
)
