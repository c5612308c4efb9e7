"""Gated activation with dynamic quantisation of its result: silu(gate) * up to int8, one scale a token.

scale = max(|value|) / 127 and int8 = value / scale, rounded to the nearest, ties to even: the symmetric per-token
quantisation that int8 matrix products take (arXiv:2206.01861). A row of zeros has scale 0. All in float32. A vector
kernel: each program walks over rows; a row that does not fit a tile is computed twice, for its maximum and its values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel

TILE_VALUES = 2048  # values of the result at once
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken off again, leaves float32 rounded to an integer


@triton.jit
def _gated(source, inside, WIDTH: tl.constexpr):
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def swiglu_quant_kernel(x, out, scales, num_rows, row_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """x [num_rows, 2 * WIDTH], rows row_stride values apart -> out [num_rows, WIDTH] int8, scales [num_rows]."""
    column = tl.arange(0, TILE)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        source = x + tl.cast(row, tl.int64) * row_stride
        target = out + tl.cast(row, tl.int64) * WIDTH
        largest = tl.zeros([TILE], tl.float32)
        for start in range(0, WIDTH, TILE):
            value = _gated(source + start + column, start + column < WIDTH, WIDTH)
            largest = tl.maximum(largest, tl.abs(value))
        peak = tl.max(largest, 0)
        tl.store(scales + row, peak / 127.0)
        inverse = 127.0 / tl.maximum(peak, 1.0e-30)
        for start in range(0, WIDTH, TILE):
            inside = start + column < WIDTH
            value = _gated(source + start + column, inside, WIDTH) * inverse
            whole = value + _TO_INTEGER - _TO_INTEGER
            tl.store(target + start + column, whole.to(tl.int8), mask=inside)


def tiling(width: int) -> dict[str, int]:
    """The kernel's constexprs for a result of this width."""
    return {"WIDTH": width, "TILE": min(TILE_VALUES, triton.next_power_of_2(width))}


def swiglu_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, 2N] float, gates then ups -> ([T, N] int8, scales [T] float32)."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        swiglu_quant_kernel[(vector_programs(x.device, rows),)](x, out, scales, rows, x.stride(0), **tiling(width))
    return out, scales


def swiglu_quant_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    value = gate * torch.sigmoid(gate) * up
    peak = value.abs().amax(-1)
    whole = torch.round(value * (127 / peak.clamp(min=1e-30)).unsqueeze(-1))
    return whole.to(torch.int8), peak / 127


def _case(dtype: str, width: int) -> CompileCase:
    signature = {"x": f"*{dtype}", "out": "*i8", "scales": "*fp32", "num_rows": "i32", "row_stride": "i32"}
    return CompileCase(f"{dtype}, {width} wide", signature, tiling(width))


KERNELS = (
    Kernel(
        swiglu_quant_kernel,
        (*(_case(dtype, 11008) for dtype in FLOAT_TYPES), _case("bf16", 768)),
        ub_budget=144 << 10),
)
