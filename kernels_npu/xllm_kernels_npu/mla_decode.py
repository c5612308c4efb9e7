"""Latent attention (MLA, arXiv:2405.04434) of one query token a row over the paged cache, projections absorbed.

A query is in the latents' own space: its product with a latent is a score, and the weighted sum of latents is the
result, from which the caller makes values. All heads share a cached vector of C + R values, the latent and the rotated
part of the key. An item of work is one row, a group of heads and one split of the row's keys; splits are combined as in
paged_decode. Lengths and block tables are read from device memory.

Letters: B rows, H heads, C latent size, R rotated size, M blocks of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import cube_programs, vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel
from xllm_kernels_npu.paged_decode import combine_kernel, num_splits
from xllm_kernels_npu.tiles import HIDDEN, padded, tile_of_keys

HEADS_AT_ONCE = 16


@triton.jit(do_not_specialize=["num_rows", "latent_stride", "rotated_stride", "table_stride"])
def mla_decode_kernel(
    latent_query, rotated_query, cache, block_table, seq_lens, out, peaks, sums,
    num_rows, latent_stride, rotated_stride, table_stride, scale,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, LATENT_DIM: tl.constexpr, ROTATED_DIM: tl.constexpr, TILE: tl.constexpr,
):
    """latent_query [num_rows, H, C] and rotated_query [num_rows, H, R], heads C and R values apart, rows their strides;
    cache [blocks, BLOCK_SIZE, C + R]; block_table [num_rows, M] int32; seq_lens [num_rows] int32. One split: out
    [num_rows, H, C] is the result. Else out [num_rows, H, SPLITS, C], peaks and sums [num_rows, H, SPLITS] are float32
    and for combine_kernel.
    """
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = LATENT + ROTATED
    member, lane = tl.arange(0, GROUP), tl.arange(0, TILE)
    dim, turn = tl.arange(0, LATENT_DIM), tl.arange(0, ROTATED_DIM)
    for item in range(tl.program_id(0), num_rows * GROUPS * SPLITS, tl.num_programs(0)):
        row = item // (GROUPS * SPLITS)
        first_head = item // SPLITS % GROUPS * GROUP
        split = item % SPLITS
        length = tl.load(seq_lens + row)
        tiles = (length + TILE - 1) // TILE
        share = (tiles + SPLITS - 1) // SPLITS
        begin = split * share
        end = tl.minimum(begin + share, tiles)
        there = first_head + member < HEADS
        latents_there = there[:, None] & (dim < LATENT)[None, :]
        latent_q = tl.load(latent_query + tl.cast(row, tl.int64) * latent_stride + first_head * LATENT
                           + member[:, None] * LATENT + dim[None, :], mask=latents_there, other=0.0)
        rotated_q = tl.load(rotated_query + tl.cast(row, tl.int64) * rotated_stride + first_head * ROTATED
                            + member[:, None] * ROTATED + turn[None, :],
                            mask=there[:, None] & (turn < ROTATED)[None, :], other=0.0)
        peak = tl.full([GROUP], HIDDEN, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        result = tl.zeros([GROUP, LATENT_DIM], tl.float32)
        for tile in range(begin, end):
            position = tile * TILE
            block = tl.load(block_table + tl.cast(row, tl.int64) * table_stride + position // BLOCK_SIZE)
            at = tl.cast(block, tl.int64) * (BLOCK_SIZE * WIDTH) + position % BLOCK_SIZE * WIDTH
            known = position + lane < length
            latents = tl.load(cache + at + lane[:, None] * WIDTH + dim[None, :],
                              mask=known[:, None] & (dim < LATENT)[None, :], other=0.0)
            rotated = tl.load(cache + at + LATENT + lane[:, None] * WIDTH + turn[None, :],
                              mask=known[:, None] & (turn < ROTATED)[None, :], other=0.0)
            scores = tl.dot(latent_q, tl.trans(latents), input_precision="ieee")
            scores += tl.dot(rotated_q, tl.trans(rotated), input_precision="ieee")
            scores = tl.where(known[None, :], scores * scale, HIDDEN)
            higher = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            fade = tl.exp(peak - higher)
            total = total * fade + tl.sum(weights, 1)
            result = result * fade[:, None] + tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")
            peak = higher
        heads = tl.cast(row, tl.int64) * HEADS + first_head
        if SPLITS == 1:
            result = result / tl.maximum(total, 1.0e-30)[:, None]
            tl.store(out + heads * LATENT + member[:, None] * LATENT + dim[None, :], result.to(out.dtype.element_ty),
                     mask=latents_there)
        else:
            place = heads * SPLITS + split
            tl.store(out + place * LATENT + member[:, None] * (SPLITS * LATENT) + dim[None, :], result,
                     mask=latents_there)
            tl.store(peaks + place + member * SPLITS, peak, mask=there)
            tl.store(sums + place + member * SPLITS, total, mask=there)


def mla_decode(
    latent_query: torch.Tensor, rotated_query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, splits: int = 0,
) -> torch.Tensor:
    """latent_query [B, H, C], rotated_query [B, H, R]; cache [blocks, block_size, C + R] of their dtype, block_size a
    multiple of 16; block_table [B, M] int32; seq_lens [B] int32, the query's own token included -> [B, H, C], the
    weighted sum of latents. A row of length 0 gives 0.

    splits: a power of two; 0 chooses by the number of rows and the width of the table.
    """
    rows, heads, latent = latent_query.shape
    latent_query, rotated_query = (query if query.stride()[1:] == (query.shape[2], 1) else query.contiguous()
                                   for query in (latent_query, rotated_query))
    out = torch.empty_like(latent_query, memory_format=torch.contiguous_format)
    if not rows:
        return out
    constants = tiling(heads, latent, rotated_query.shape[2], cache.shape[1], cache.dtype.itemsize)
    items = rows * -(-heads // HEADS_AT_ONCE)
    splits = splits or num_splits(cache.device, items, block_table.shape[1] * cache.shape[1])
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits, latent, dtype=torch.float32, device=cache.device)
        peaks, sums = (torch.empty(rows, heads, splits, dtype=torch.float32, device=cache.device) for _ in "ps")
    mla_decode_kernel[(cube_programs(cache.device, items * splits),)](
        latent_query, rotated_query, cache, block_table, seq_lens, parts, peaks, sums, rows, latent_query.stride(0),
        rotated_query.stride(0), block_table.stride(0), scale, SPLITS=splits, **constants)
    if splits > 1:
        combine_kernel[(vector_programs(cache.device, rows * heads),)](
            parts, peaks, sums, out, rows * heads, HEAD_DIM=latent, SPLITS=splits, DIM=constants["LATENT_DIM"])
    return out


def tiling(heads: int, latent: int, rotated: int, block_size: int, itemsize: int) -> dict[str, int]:
    dim = padded(latent)
    return {"HEADS": heads, "LATENT": latent, "ROTATED": rotated, "BLOCK_SIZE": block_size, "GROUP": HEADS_AT_ONCE,
            "LATENT_DIM": dim, "ROTATED_DIM": padded(rotated), "TILE": tile_of_keys(block_size, dim, itemsize)}


def mla_decode_reference(
    latent_query: torch.Tensor, rotated_query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, scale: float,
) -> torch.Tensor:
    """mla_decode's arguments -> [B, H, C] float32."""
    out = torch.zeros(latent_query.shape, dtype=torch.float32)
    query = torch.cat((latent_query, rotated_query), -1).float()  # [B, H, C + R]
    for row, length in enumerate(seq_lens.tolist()):
        blocks = block_table[row, : -(-length // cache.shape[1])].long()
        keys = cache[blocks].flatten(0, 1)[:length].float()
        out[row] = (query[row] @ keys.T * scale).softmax(-1) @ keys[:, : latent_query.shape[2]]
    return out


def _case(dtype: str, heads: int, latent: int, rotated: int, splits: int) -> CompileCase:
    part = "fp32" if splits > 1 else dtype
    return CompileCase(
        f"{dtype}, {heads} heads of {latent} + {rotated}, {splits} splits",
        {**dict.fromkeys(("latent_query", "rotated_query", "cache"), f"*{dtype}"),
         **dict.fromkeys(("block_table", "seq_lens"), "*i32"), **dict.fromkeys(("out", "peaks", "sums"), f"*{part}"),
         **dict.fromkeys(("num_rows", "latent_stride", "rotated_stride", "table_stride"), "i32"), "scale": "fp32"},
        {**tiling(heads, latent, rotated, 128, FLOAT_TYPES[dtype]), "SPLITS": splits})


KERNELS = (
    Kernel(
        mla_decode_kernel,
        (*(_case(dtype, 128, 512, 64, splits) for dtype in FLOAT_TYPES for splits in (1, 4)),
         _case("bf16", 20, 512, 64, 16)),
        ub_budget=96 << 10),
)
