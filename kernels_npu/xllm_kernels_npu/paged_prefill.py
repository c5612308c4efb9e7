"""Causal attention of rows with several query tokens over the paged cache: prompts, their chunks, what follows a cached
prefix.

A row's queries are the last of its keys. An item of work is a tile of one row's queries and one query head; it runs an
online softmax over the tiles of keys that the queries see (arXiv:2205.14135). How many items a row has is known on the
device only: every program walks over all rows and takes each n-th item of their concatenation.
Sliding window, soft cap and sinks as LayerAttention has them.

Letters: B rows, T query tokens in all, H query heads, K key/value heads, E head size, M blocks of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import cube_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel
from xllm_kernels_npu.tiles import HIDDEN, padded, tile_of_keys

_QUERIES = 64  # of a tile; half as many where a head has more values than _WIDE
_WIDE = 128


@triton.jit(do_not_specialize=["num_rows", "query_stride", "table_stride", "window"])
def paged_prefill_kernel(
    query, key_cache, value_cache, block_table, query_start, seq_lens, sinks, out,
    num_rows, query_stride, table_stride, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """query [T, H, E]; caches [blocks, BLOCK_SIZE, K, E]; block_table [num_rows, M] int32; query_start [num_rows + 1]
    int32; seq_lens [num_rows] int32 -> out [T, H, E].
    """
    TOKEN: tl.constexpr = KV_HEADS * HEAD_DIM
    dim, lane, asked = tl.arange(0, DIM), tl.arange(0, TILE), tl.arange(0, QUERIES)
    programs = tl.num_programs(0)
    first = tl.program_id(0)  # this program's next item, counted from the row's first
    for row in range(0, num_rows):
        begin = tl.load(query_start + row)
        count = tl.load(query_start + row + 1) - begin
        length = tl.load(seq_lens + row)
        items = (count + QUERIES - 1) // QUERIES * HEADS
        table = block_table + tl.cast(row, tl.int64) * table_stride
        for item in range(first, items, programs):
            head = item % HEADS
            start = item // HEADS * QUERIES
            position = length - count + start  # of the tile's first query
            mine = (start + asked < count)[:, None] & (dim < HEAD_DIM)[None, :]
            token = tl.cast(begin + start, tl.int64)
            queries = tl.load(query + token * query_stride + head * HEAD_DIM + asked[:, None] * query_stride
                              + dim[None, :], mask=mine, other=0.0)
            peak = tl.full([QUERIES], HIDDEN, tl.float32)
            total = tl.zeros([QUERIES], tl.float32)
            if HAS_SINKS:  # a score without a value
                peak = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head)
                total += 1.0
            result = tl.zeros([QUERIES, DIM], tl.float32)
            end = (tl.minimum(position + QUERIES, length) + TILE - 1) // TILE  # tiles
            oldest = 0
            if HAS_WINDOW:
                oldest = tl.maximum(position - window + 1, 0) // TILE
            for tile in range(oldest, end):
                key = tile * TILE
                block = tl.load(table + key // BLOCK_SIZE)
                at = (tl.cast(block, tl.int64) * (BLOCK_SIZE * TOKEN) + key % BLOCK_SIZE * TOKEN
                      + head // (HEADS // KV_HEADS) * HEAD_DIM)
                offset = lane[:, None] * TOKEN + dim[None, :]
                there = (key + lane < length)[:, None] & (dim < HEAD_DIM)[None, :]
                keys = tl.load(key_cache + at + offset, mask=there, other=0.0)
                values = tl.load(value_cache + at + offset, mask=there, other=0.0)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
                if HAS_SOFTCAP:  # softcap * tanh(score / softcap)
                    scores = softcap - 2.0 * softcap / (tl.exp(scores * (2.0 / softcap)) + 1.0)
                seen = (key + lane)[None, :] <= (position + asked)[:, None]
                if HAS_WINDOW:
                    seen = seen & ((key + lane)[None, :] > (position + asked)[:, None] - window)
                scores = tl.where(seen, scores, HIDDEN)
                higher = tl.maximum(peak, tl.max(scores, 1))
                weights = tl.exp(scores - higher[:, None])
                fade = tl.exp(peak - higher)
                total = total * fade + tl.sum(weights, 1)
                result = result * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
                peak = higher
            result = result / total[:, None]
            place = token * (HEADS * HEAD_DIM) + head * HEAD_DIM
            tl.store(out + place + asked[:, None] * (HEADS * HEAD_DIM) + dim[None, :],
                     result.to(out.dtype.element_ty), mask=mine)
        taken = tl.maximum(items - first + programs - 1, 0) // programs
        first += taken * programs - items


def paged_prefill(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_table: torch.Tensor,
    query_start: torch.Tensor, seq_lens: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, E]: row i's tokens lie from query_start[i] to query_start[i + 1] and are the last of its seq_lens[i]
    keys; caches [blocks, block_size, K, E] of query's dtype, block_size a multiple of 16; block_table [B, M],
    query_start [B + 1], seq_lens [B] int32; sinks [H] float32 -> [T, H, E], `out` if given. Tokens of no row are left.
    """
    tokens, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    query = query if query.stride()[1:] == (head_dim, 1) else query.contiguous()
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    rows = seq_lens.shape[0]
    if not rows:
        return out
    constants = tiling(heads, kv_heads, head_dim, block_size, query.dtype.itemsize)
    items = (tokens // constants["QUERIES"] + rows) * heads  # or fewer
    paged_prefill_kernel[(cube_programs(query.device, items),)](
        query, key_cache, value_cache, block_table, query_start, seq_lens, seq_lens if sinks is None else sinks, out,
        rows, query.stride(0), block_table.stride(0), window, scale, softcap,
        **constants, HAS_WINDOW=window > 0, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None)
    return out


def tiling(heads: int, kv_heads: int, head_dim: int, block_size: int, itemsize: int) -> dict[str, int]:
    dim = padded(head_dim)
    return {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size,
            "QUERIES": _QUERIES if head_dim <= _WIDE else _QUERIES // 2, "DIM": dim,
            "TILE": tile_of_keys(block_size, dim, itemsize)}


def _case(dtype: str, heads: int, kv_heads: int, head_dim: int, **extras: bool) -> CompileCase:
    pointers = dict.fromkeys(("query", "key_cache", "value_cache"), f"*{dtype}")
    used = [name for name, has in extras.items() if has]
    has = {f"HAS_{name.upper()}": extras.get(name, False) for name in ("window", "softcap", "sinks")}
    return CompileCase(
        ", ".join([dtype, f"{heads}/{kv_heads} heads of {head_dim}", *used]),
        {**pointers, **dict.fromkeys(("block_table", "query_start", "seq_lens"), "*i32"),
         "sinks": "*fp32" if has["HAS_SINKS"] else "*i32", "out": f"*{dtype}",
         **dict.fromkeys(("num_rows", "query_stride", "table_stride", "window"), "i32"), "scale": "fp32",
         "softcap": "fp32"},
        {**tiling(heads, kv_heads, head_dim, 128, FLOAT_TYPES[dtype]), **has})


KERNELS = (
    Kernel(
        paged_prefill_kernel,
        (*(_case(dtype, 32, 8, 128) for dtype in FLOAT_TYPES), _case("bf16", 9, 3, 64), _case("bf16", 32, 32, 96),
         _case("bf16", 16, 8, 256, softcap=True), _case("bf16", 64, 8, 64, window=True, sinks=True)),
        ub_budget=176 << 10),
)
