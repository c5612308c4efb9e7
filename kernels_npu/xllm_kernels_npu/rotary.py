"""Rotary position embedding of the query and key heads of packed rows (arXiv:2104.09864), in place.

Pairs are (i, i + R/2), or (2i, 2i + 1) where INTERLEAVED; of each head of E values the first R are rotated. With norms,
every head is RMS-normalised before, all E values of it. A vector kernel: an item of work is one token's tile of heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel

TILE_VALUES = 2048  # values of half a tile of heads; of a quarter where pairs are interleaved, which takes copies


@triton.jit
def _gain(q_norm, k_norm, is_query, at, inside):
    """[HEADS, ...] float32: the weights of each head's norm."""
    query = tl.load(q_norm + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(k_norm + at, mask=inside, other=0.0).to(tl.float32)
    chosen = is_query.to(tl.float32)[:, None]
    return query[None, :] * chosen + key[None, :] * (1.0 - chosen)


@triton.jit(do_not_specialize=["num_tokens", "row_stride"])
def rotary_kernel(
    qkv, positions, cos_sin, q_norm, k_norm, num_tokens, row_stride, eps,
    QUERY_HEADS: tl.constexpr, ROTATED_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
):
    """qkv [num_tokens, heads, HEAD_DIM], rows row_stride values apart, the first ROTATED_HEADS of each row are rotated
    and the first QUERY_HEADS of those normalised by q_norm [HEAD_DIM], others by k_norm; positions [num_tokens] int;
    cos_sin [P, ROTARY_DIM] float32, cosines then sines.
    """
    PAIRS: tl.constexpr = ROTARY_DIM // 2
    TILES: tl.constexpr = (ROTATED_HEADS + HEADS - 1) // HEADS
    lane = tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    both = tl.arange(0, 2 * HALF)
    rest = tl.arange(0, REST)
    for item in range(tl.program_id(0), num_tokens * TILES, tl.num_programs(0)):
        token = item // TILES
        head = item % TILES * HEADS + lane
        there = (head < ROTATED_HEADS)[:, None]
        table = cos_sin + tl.cast(tl.load(positions + token), tl.int64) * ROTARY_DIM
        cos = tl.load(table + pair, mask=pair < PAIRS, other=0.0)[None, :]
        sin = tl.load(table + PAIRS + pair, mask=pair < PAIRS, other=0.0)[None, :]
        heads = qkv + tl.cast(token, tl.int64) * row_stride + head[:, None] * HEAD_DIM
        if INTERLEAVED:
            inside = there & (both < ROTARY_DIM)[None, :]
            whole = tl.load(heads + both[None, :], mask=inside, other=0.0).to(tl.float32)
            one, two = tl.split(tl.reshape(whole, [HEADS, HALF, 2]))
        else:
            inside = there & (pair < PAIRS)[None, :]
            one = tl.load(heads + pair[None, :], mask=inside, other=0.0).to(tl.float32)
            two = tl.load(heads + PAIRS + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(one * one + two * two, 1)
            if ROTARY_DIM < HEAD_DIM:
                kept = there & (ROTARY_DIM + rest < HEAD_DIM)[None, :]
                other = tl.load(heads + ROTARY_DIM + rest[None, :], mask=kept, other=0.0).to(tl.float32)
                squares += tl.sum(other * other, 1)
            scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            is_query = head < QUERY_HEADS
            if INTERLEAVED:
                one *= scale * _gain(q_norm, k_norm, is_query, 2 * pair, pair < PAIRS)
                two *= scale * _gain(q_norm, k_norm, is_query, 2 * pair + 1, pair < PAIRS)
            else:
                one *= scale * _gain(q_norm, k_norm, is_query, pair, pair < PAIRS)
                two *= scale * _gain(q_norm, k_norm, is_query, PAIRS + pair, pair < PAIRS)
            if ROTARY_DIM < HEAD_DIM:
                other *= scale * _gain(q_norm, k_norm, is_query, ROTARY_DIM + rest, ROTARY_DIM + rest < HEAD_DIM)
                tl.store(heads + ROTARY_DIM + rest[None, :], other.to(qkv.dtype.element_ty), mask=kept)
        first = one * cos - two * sin
        second = two * cos + one * sin
        if INTERLEAVED:
            turned = tl.interleave(first, second)
            tl.store(heads + both[None, :], turned.to(qkv.dtype.element_ty), mask=inside)
        else:
            tl.store(heads + pair[None, :], first.to(qkv.dtype.element_ty), mask=inside)
            tl.store(heads + PAIRS + pair[None, :], second.to(qkv.dtype.element_ty), mask=inside)


def tiling(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, interleaved: bool = False
) -> dict[str, int]:
    """The kernel's constexprs for heads of this shape."""
    half = triton.next_power_of_2(rotary_dim // 2)
    rest = triton.next_power_of_2(max(1, head_dim - rotary_dim))
    rotated = num_heads + num_kv_heads
    values = TILE_VALUES // 2 if interleaved else TILE_VALUES
    heads = min(triton.next_power_of_2(rotated), max(1, values // max(half, rest)))
    return {"QUERY_HEADS": num_heads, "ROTATED_HEADS": rotated, "HEAD_DIM": head_dim, "ROTARY_DIM": rotary_dim,
            "HALF": half, "REST": rest, "HEADS": heads, "INTERLEAVED": interleaved}


def rotary(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, num_heads: int, num_kv_heads: int,
    q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, eps: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """qkv [T, (H + 2K) * E] float, rows of one stride, changed in place and returned; positions [T] int; cos_sin [P, R]
    float32 contiguous, R even and at most E; norm weights [E] float.
    """
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    constants = tiling(num_heads, num_kv_heads, head_dim, cos_sin.shape[1], interleaved)
    if qkv.shape[0]:
        work = qkv.shape[0] * triton.cdiv(constants["ROTATED_HEADS"], constants["HEADS"])
        normed = q_norm is not None and k_norm is not None
        rotary_kernel[(vector_programs(qkv.device, work),)](
            qkv, positions, cos_sin, q_norm if normed else qkv, k_norm if normed else qkv, qkv.shape[0], qkv.stride(0),
            eps, **constants, HAS_NORM=normed)
    return qkv


def rotary_reference(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, num_heads: int, num_kv_heads: int,
    q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, eps: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """[T, (H + 2K) * E] float32, not rounded."""
    heads = qkv.float().unflatten(1, (num_heads + 2 * num_kv_heads, -1)).clone()  # [T, H + 2K, E]
    rotated = heads[:, : num_heads + num_kv_heads]
    if q_norm is not None and k_norm is not None:
        gain = torch.stack([q_norm.float()] * num_heads + [k_norm.float()] * num_kv_heads)
        rotated *= torch.rsqrt(rotated.square().mean(-1, keepdim=True) + eps) * gain
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    turning = rotated[..., : cos_sin.shape[1]]
    one, two = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    first, second = one * cos - two * sin, two * cos + one * sin
    one.copy_(first)
    two.copy_(second)
    return heads.flatten(1)


def _case(
    dtype: str, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, interleaved: bool = False,
    normed: bool = False,
) -> CompileCase:
    pairs = f"{rotary_dim} of {head_dim}" if rotary_dim < head_dim else str(head_dim)
    kind = ", interleaved" * interleaved + ", normed" * normed
    return CompileCase(
        f"{dtype}, {heads}+{kv_heads} heads, {pairs}{kind}",
        {"qkv": f"*{dtype}", "positions": "*i64", "cos_sin": "*fp32", "q_norm": f"*{dtype}", "k_norm": f"*{dtype}",
         "num_tokens": "i32", "row_stride": "i32", "eps": "fp32"},
        {**tiling(heads, kv_heads, head_dim, rotary_dim, interleaved), "HAS_NORM": normed})


KERNELS = (
    Kernel(
        rotary_kernel,
        (*(_case(dtype, 32, 8, 128, 128) for dtype in FLOAT_TYPES), _case("bf16", 9, 3, 64, 64),
         _case("bf16", 32, 8, 128, 128, normed=True), _case("bf16", 32, 2, 128, 64, interleaved=True),
         _case("bf16", 96, 8, 128, 64, normed=True), _case("bf16", 16, 4, 128, 128, interleaved=True, normed=True),
         _case("fp32", 16, 4, 128, 128, interleaved=True, normed=True), _case("fp32", 96, 8, 128, 64, normed=True)),
        ub_budget=136 << 10),
)
