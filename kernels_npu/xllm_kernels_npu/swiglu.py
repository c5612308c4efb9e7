"""Gated activation: x holds gates, then ups; out = silu(gate) * up, computed in float32 (arXiv:2002.05202).

A vector kernel: each program walks over tiles of rows, piece by piece.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel

TILE_VALUES = 4096  # values of the result at once


@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def swiglu_kernel(x, out, num_rows, row_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """x [num_rows, 2 * WIDTH], its rows row_stride values apart -> out [num_rows, WIDTH], contiguous."""
    PIECES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    lane = tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    for item in range(tl.program_id(0), (num_rows + ROWS - 1) // ROWS * PIECES, tl.num_programs(0)):
        first = item // PIECES * ROWS
        start = item % PIECES * TILE
        inside = (first + lane < num_rows)[:, None] & (start + column < WIDTH)[None, :]
        source = x + tl.cast(first, tl.int64) * row_stride + start + lane[:, None] * row_stride + column[None, :]
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up
        target = out + tl.cast(first, tl.int64) * WIDTH + start + lane[:, None] * WIDTH + column[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def tiling(width: int) -> dict[str, int]:
    """The kernel's constexprs for a result of this width."""
    tile = min(TILE_VALUES, triton.next_power_of_2(width))
    return {"WIDTH": width, "TILE": tile, "ROWS": TILE_VALUES // tile}


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2N] float, gates then ups, rows of one stride -> [..., N] of x's dtype."""
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if out.numel():
        constants = tiling(width)
        work = triton.cdiv(rows.shape[0], constants["ROWS"]) * triton.cdiv(width, constants["TILE"])
        swiglu_kernel[(vector_programs(x.device, work),)](rows, out, rows.shape[0], rows.stride(0), **constants)
    return out


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """In float32, not rounded."""
    gate, up = x.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _case(dtype: str, width: int) -> CompileCase:
    return CompileCase(
        f"{dtype}, {width} wide",
        {"x": f"*{dtype}", "out": f"*{dtype}", "num_rows": "i32", "row_stride": "i32"}, tiling(width))


KERNELS = (
    Kernel(
        swiglu_kernel,
        (*(_case(dtype, 11008) for dtype in FLOAT_TYPES), _case("bf16", 1536), _case("bf16", 768)),
        ub_budget=112 << 10),
)
