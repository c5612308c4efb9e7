"""Writes new keys and values, or latents, to their slots of the paged cache.

A vector kernel: each program walks over tokens and moves whole rows. Padded tokens have slots of the dummy block, where
what is written by several programs at once is never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import FLOAT_TYPES, CompileCase, Kernel

TILE_VALUES = 4096  # values of a row at once


@triton.jit(do_not_specialize=["num_tokens", "key_stride", "value_stride"])
def kv_store_kernel(
    key, value, key_cache, value_cache, slots, num_tokens, key_stride, value_stride,
    WIDTH: tl.constexpr, TILE: tl.constexpr, HAS_VALUE: tl.constexpr,
):
    """key, value [num_tokens, WIDTH], rows their strides apart; caches [slots, WIDTH]; slots [num_tokens] int."""
    column = tl.arange(0, TILE)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        slot = tl.cast(tl.load(slots + token), tl.int64) * WIDTH
        for first in range(0, WIDTH, TILE):
            inside = first + column < WIDTH
            source = key + tl.cast(token, tl.int64) * key_stride + first
            tl.store(key_cache + slot + first + column, tl.load(source + column, mask=inside), mask=inside)
            if HAS_VALUE:
                source = value + tl.cast(token, tl.int64) * value_stride + first
                tl.store(value_cache + slot + first + column, tl.load(source + column, mask=inside), mask=inside)


def kv_store(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """key, value [T, K, E] to slots [T] int64 of caches [blocks, block_size, K, E], all of one dtype."""
    _launch(key, value, key_cache, value_cache, slots)


def latent_store(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """latent [T, W] to slots [T] int64 of a cache [blocks, block_size, W] of its dtype."""
    _launch(latent, None, cache, None, slots)


def _launch(
    key: torch.Tensor, value: torch.Tensor | None, key_cache: torch.Tensor, value_cache: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    if not slots.shape[0]:
        return
    keys = key.flatten(1)
    values = keys if value is None else value.flatten(1)
    width = keys.shape[1]
    kv_store_kernel[(vector_programs(key.device, slots.shape[0]),)](
        keys, values, key_cache, key_cache if value_cache is None else value_cache, slots, slots.shape[0],
        keys.stride(0), values.stride(0), **_tiling(width, value is not None))


def kv_store_reference(new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """new [T, ...] to slots [T] of cache [blocks, block_size, ...]."""
    cache.view(-1, *new.shape[1:])[slots.long()] = new


def _tiling(width: int, has_value: bool) -> dict[str, int | bool]:
    return {"WIDTH": width, "TILE": min(TILE_VALUES, triton.next_power_of_2(width)), "HAS_VALUE": has_value}


def _case(dtype: str, width: int, has_value: bool = True) -> CompileCase:
    pointers = dict.fromkeys(("key", "value", "key_cache", "value_cache"), f"*{dtype}")
    return CompileCase(
        f"{dtype}, {'K and V of' if has_value else 'latents of'} {width}",
        {**pointers, "slots": "*i64", "num_tokens": "i32", "key_stride": "i32", "value_stride": "i32"},
        _tiling(width, has_value))


KERNELS = (
    Kernel(
        kv_store_kernel,
        (*(_case(dtype, 1024) for dtype in FLOAT_TYPES), _case("bf16", 192), _case("bf16", 576, has_value=False)),
        ub_budget=24 << 10),
)
