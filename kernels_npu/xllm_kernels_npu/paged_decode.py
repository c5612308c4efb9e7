"""Attention of one query token a row over the paged cache, the row's keys split over several programs.

An item of work is one row, one key/value head with the query heads that share it, and one split of the row's keys; it
runs an online softmax over tiles of keys (arXiv:2205.14135). With more than one split, each leaves its sum, its peak
and its unscaled output, and a second kernel combines them (Flash-Decoding). Lengths and block tables are read from
device memory; a split without keys leaves nothing. Sliding window, soft cap and sinks as LayerAttention has them.

Letters: B rows, H query heads, K key/value heads, E head size, M blocks of a table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import cube_programs, vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel
from xllm_kernels_npu.tiles import HIDDEN, padded, tile_of_keys

MAX_SPLITS = 16


@triton.jit(do_not_specialize=["num_rows", "query_stride", "table_stride", "window"])
def paged_decode_kernel(
    query, key_cache, value_cache, block_table, seq_lens, sinks, out, peaks, sums,
    num_rows, query_stride, table_stride, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """query [num_rows, H, E]; caches [blocks, BLOCK_SIZE, K, E]; block_table [num_rows, M] int32; seq_lens [num_rows]
    int32. One split: out [num_rows, H, E] is the result. Else out [num_rows, H, SPLITS, E] float32, peaks and sums
    [num_rows, H, SPLITS] float32 are for combine_kernel.
    """
    GROUP_HEADS: tl.constexpr = HEADS // KV_HEADS
    TOKEN: tl.constexpr = KV_HEADS * HEAD_DIM
    member, dim, lane = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, TILE)
    for item in range(tl.program_id(0), num_rows * KV_HEADS * SPLITS, tl.num_programs(0)):
        row = item // (KV_HEADS * SPLITS)
        head = item // SPLITS % KV_HEADS
        split = item % SPLITS
        length = tl.load(seq_lens + row)
        end = (length + TILE - 1) // TILE  # tiles
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(length - window, 0) // TILE
        share = (end - begin + SPLITS - 1) // SPLITS
        begin += split * share
        end = tl.minimum(begin + share, end)
        members = (member < GROUP_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        first_head = head * GROUP_HEADS
        queries = tl.load(query + tl.cast(row, tl.int64) * query_stride + first_head * HEAD_DIM
                          + member[:, None] * HEAD_DIM + dim[None, :], mask=members, other=0.0)
        peak = tl.full([GROUP], HIDDEN, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        if HAS_SINKS:  # a score without a value, seen by the first split
            if split == 0:
                peak = tl.load(sinks + first_head + member, mask=member < GROUP_HEADS, other=0.0)
                total += 1.0
        result = tl.zeros([GROUP, DIM], tl.float32)
        for tile in range(begin, end):
            position = tile * TILE
            block = tl.load(block_table + tl.cast(row, tl.int64) * table_stride + position // BLOCK_SIZE)
            at = tl.cast(block, tl.int64) * (BLOCK_SIZE * TOKEN) + position % BLOCK_SIZE * TOKEN + head * HEAD_DIM
            offset = lane[:, None] * TOKEN + dim[None, :]
            there = (position + lane < length)[:, None] & (dim < HEAD_DIM)[None, :]
            keys = tl.load(key_cache + at + offset, mask=there, other=0.0)
            values = tl.load(value_cache + at + offset, mask=there, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            if HAS_SOFTCAP:  # softcap * tanh(score / softcap)
                scores = softcap - 2.0 * softcap / (tl.exp(scores * (2.0 / softcap)) + 1.0)
            seen = position + lane < length
            if HAS_WINDOW:
                seen = seen & (position + lane >= length - window)
            scores = tl.where(seen[None, :], scores, HIDDEN)
            higher = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            fade = tl.exp(peak - higher)
            total = total * fade + tl.sum(weights, 1)
            result = result * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            peak = higher
        heads = tl.cast(row, tl.int64) * HEADS + first_head
        if SPLITS == 1:
            result = result / tl.maximum(total, 1.0e-30)[:, None]
            tl.store(out + heads * HEAD_DIM + member[:, None] * HEAD_DIM + dim[None, :],
                     result.to(out.dtype.element_ty), mask=members)
        else:
            place = heads * SPLITS + split
            tl.store(out + place * HEAD_DIM + member[:, None] * (SPLITS * HEAD_DIM) + dim[None, :], result,
                     mask=members)
            tl.store(peaks + place + member * SPLITS, peak, mask=member < GROUP_HEADS)
            tl.store(sums + place + member * SPLITS, total, mask=member < GROUP_HEADS)


@triton.jit(do_not_specialize=["num_heads"])
def combine_kernel(
    parts, peaks, sums, out, num_heads, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr
):
    """parts [num_heads, SPLITS, HEAD_DIM], peaks and sums [num_heads, SPLITS], all float32 -> out [num_heads,
    HEAD_DIM]; num_heads are those of all rows.
    """
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    for head in range(tl.program_id(0), num_heads, tl.num_programs(0)):
        place = tl.cast(head, tl.int64) * SPLITS
        peak = tl.load(peaks + place + split)
        weights = tl.exp(peak - tl.max(peak, 0))
        total = tl.sum(tl.load(sums + place + split) * weights, 0)
        part = tl.load(parts + place * HEAD_DIM + split[:, None] * HEAD_DIM + dim[None, :],
                       mask=(dim < HEAD_DIM)[None, :] & (split < SPLITS)[:, None], other=0.0)
        result = tl.sum(part * weights[:, None], 0) / tl.maximum(total, 1.0e-30)
        tl.store(out + tl.cast(head, tl.int64) * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def num_splits(device: torch.device, items: int, keys: int) -> int:
    """A power of two that gives every core an item, and every split some tiles of keys if there are so many."""
    splits = 1
    while 2 * splits * items <= cube_programs(device, 1 << 20) and splits < MAX_SPLITS and splits * 256 < keys:
        splits *= 2
    return splits


def paged_decode(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    splits: int = 0,
) -> torch.Tensor:
    """query [B, H, E]; caches [blocks, block_size, K, E] of its dtype, block_size a multiple of 16; block_table [B, M]
    int32; seq_lens [B] int32, the query's own token included; sinks [H] float32 -> [B, H, E]. Rows of length 0 give 0.

    splits: a power of two; 0 chooses by the number of rows and the width of the table.
    """
    rows, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    query = query if query.stride()[1:] == (head_dim, 1) else query.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not rows:
        return out
    splits = splits or num_splits(query.device, rows * kv_heads, block_table.shape[1] * block_size)
    constants = tiling(heads, kv_heads, head_dim, block_size, query.dtype.itemsize)
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        peaks, sums = (torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device) for _ in "ps")
    paged_decode_kernel[(cube_programs(query.device, rows * kv_heads * splits),)](
        query, key_cache, value_cache, block_table, seq_lens, seq_lens if sinks is None else sinks, parts, peaks, sums,
        rows, query.stride(0), block_table.stride(0), window, scale, softcap, SPLITS=splits, **constants,
        HAS_WINDOW=window > 0, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None)
    if splits > 1:
        combine_kernel[(vector_programs(query.device, rows * heads),)](
            parts, peaks, sums, out, rows * heads, HEAD_DIM=head_dim, SPLITS=splits, DIM=constants["DIM"])
    return out


def tiling(heads: int, kv_heads: int, head_dim: int, block_size: int, itemsize: int) -> dict[str, int]:
    dim = padded(head_dim)
    return {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size,
            "GROUP": padded(heads // kv_heads), "DIM": dim, "TILE": tile_of_keys(block_size, dim, itemsize)}


def paged_attention_reference(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, query_start: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, E]: row i's tokens lie from query_start[i] to query_start[i + 1] and are the last of its
    seq_lens[i]; the rest as paged_decode -> [T, H, E] float32, causal.
    """
    out = torch.zeros(query.shape, dtype=torch.float32)
    group = query.shape[1] // key_cache.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = query_start[row : row + 2].tolist()
        blocks = block_table[row, : -(-length // key_cache.shape[1])].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
                        for cache in (key_cache, value_cache))
        scores = torch.einsum("qhe,khe->hqk", query[begin:end].float(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (end - begin), length)[:, None]
        of = torch.arange(length)[None, :]
        hidden = (of > at) | ((of <= at - window) if window else torch.zeros(1, 1, dtype=torch.bool))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, end - begin, 1)), -1)
        out[begin:end] = torch.einsum("hqk,khe->qhe", scores.softmax(-1)[..., :length], values)
    return out


def _case(dtype: str, heads: int, kv_heads: int, head_dim: int, splits: int, **extras: bool) -> CompileCase:
    pointers = dict.fromkeys(("query", "key_cache", "value_cache"), f"*{dtype}")
    part = "fp32" if splits > 1 else dtype
    used = [name for name, has in extras.items() if has]
    has = {f"HAS_{name.upper()}": extras.get(name, False) for name in ("window", "softcap", "sinks")}
    return CompileCase(
        ", ".join([dtype, f"{heads}/{kv_heads} heads of {head_dim}", f"{splits} splits", *used]),
        {**pointers, "block_table": "*i32", "seq_lens": "*i32", "sinks": "*fp32" if has["HAS_SINKS"] else "*i32",
         "out": f"*{part}", "peaks": f"*{part}", "sums": f"*{part}",
         **dict.fromkeys(("num_rows", "query_stride", "table_stride", "window"), "i32"), "scale": "fp32",
         "softcap": "fp32"},
        {**tiling(heads, kv_heads, head_dim, 128, FLOAT_TYPES[dtype]), "SPLITS": splits, **has})


def _combine_case(dtype: str, head_dim: int, splits: int) -> CompileCase:
    signature = {**dict.fromkeys(("parts", "peaks", "sums"), "*fp32"), "out": f"*{dtype}", "num_heads": "i32"}
    constants: dict[str, Any] = {"HEAD_DIM": head_dim, "SPLITS": splits, "DIM": padded(head_dim)}
    return CompileCase(f"{dtype}, {splits} splits of {head_dim}", signature, constants)


KERNELS = (
    Kernel(
        paged_decode_kernel,
        (*(_case(dtype, 32, 8, 128, splits) for dtype in FLOAT_TYPES for splits in (1, 4)),
         _case("bf16", 9, 3, 64, 16), _case("bf16", 32, 32, 96, 1), _case("bf16", 16, 8, 256, 1, softcap=True),
         _case("bf16", 64, 8, 64, 2, window=True, sinks=True)),
        ub_budget=64 << 10),
    Kernel(
        combine_kernel, (*(_combine_case(dtype, 128, 4) for dtype in FLOAT_TYPES), _combine_case("bf16", 512, 16)),
        ub_budget=112 << 10),
)
