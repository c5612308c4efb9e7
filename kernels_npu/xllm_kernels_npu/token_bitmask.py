"""Constrained decoding: logits of the tokens that a grammar forbids become minus infinity, in place.

The grammar's mask is packed as XGrammar packs it (arXiv:2411.15100): token t is allowed if bit t % 32 of int32 t // 32
is set. A vector kernel: an item of work is a tile of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel

TILE_WORDS = 64  # of the mask, 32 tokens each


@triton.jit(do_not_specialize=["num_rows", "logits_stride", "mask_stride", "vocab", "words"])
def token_bitmask_kernel(
    logits, bitmask, rows, num_rows, logits_stride, mask_stride, vocab, words, TILE: tl.constexpr
):
    """logits [S, vocab], rows logits_stride apart; bitmask [num_rows, words] int32, rows mask_stride apart; rows
    [num_rows] int32: row i of the mask is for row rows[i] of logits.
    """
    word = tl.arange(0, TILE)
    bit = tl.arange(0, 32)
    # 2^bit by products of selections: a vector of shifts would be a scalar loop.
    power = tl.where((bit & 1) == 0, 1, 2) * tl.where((bit & 2) == 0, 1, 4) * tl.where((bit & 4) == 0, 1, 16)
    power = power * tl.where((bit & 8) == 0, 1, 256) * tl.where((bit & 16) == 0, 1, 65536)
    tiles = (words + TILE - 1) // TILE
    for item in range(tl.program_id(0), num_rows * tiles, tl.num_programs(0)):
        row = item // tiles
        first = item % tiles * TILE
        source = bitmask + tl.cast(row, tl.int64) * mask_stride + first
        packed = tl.load(source + word, mask=first + word < words, other=0)
        allowed = (packed[:, None] & power[None, :]) != 0
        token = first * 32 + word[:, None] * 32 + bit[None, :]
        target = logits + tl.cast(tl.load(rows + row), tl.int64) * logits_stride + token
        value = tl.load(target, mask=token < vocab, other=0.0).to(tl.float32)
        value = tl.where(allowed, value, float("-inf"))
        tl.store(target, value.to(logits.dtype.element_ty), mask=token < vocab)


def token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """logits [S, V] float, changed in place; bitmask [n, at least V / 32] int32; rows [n] int32, each once."""
    if not (rows.shape[0] and logits.shape[1]):
        return
    vocab = logits.shape[1]
    words = triton.cdiv(vocab, 32)
    assert bitmask.shape[1] >= words
    work = rows.shape[0] * triton.cdiv(words, TILE_WORDS)
    token_bitmask_kernel[(vector_programs(logits.device, work),)](
        logits, bitmask, rows, rows.shape[0], logits.stride(0), bitmask.stride(0), vocab, words, TILE=TILE_WORDS)


def token_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    allowed[rows.long()] = (bitmask[:, token // 32] >> (token % 32).int() & 1) != 0
    return logits.masked_fill(~allowed, -torch.inf)


def _case(dtype: str) -> CompileCase:
    sizes = dict.fromkeys(("num_rows", "logits_stride", "mask_stride", "vocab", "words"), "i32")
    return CompileCase(
        dtype, {"logits": f"*{dtype}", "bitmask": "*i32", "rows": "*i32", **sizes}, {"TILE": TILE_WORDS})


KERNELS = (
    Kernel(token_bitmask_kernel, tuple(_case(dtype) for dtype in FLOAT_TYPES), ub_budget=96 << 10),
)
