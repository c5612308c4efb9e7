"""Tile sizes and constants that the attention kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e30)  # a masked score, finite so that differences of two are 0 and not NaN
SMALLEST = 16  # of each side of a matrix product
KEYS = 128  # of a tile at most
TILE_BYTES = 32 << 10  # of a tile's keys at most: two of each of keys and values fit an A100's shared memory


def padded(size: int) -> int:
    """The power of two that a side of a matrix product of this size is padded to."""
    return max(SMALLEST, int(triton.next_power_of_2(size)))


def tile_of_keys(block_size: int, dim: int, itemsize: int) -> int:
    """The largest power of two of keys, of `dim` values each, that divides a block, so that a tile lies in one. Raises
    ValueError.
    """
    tile = min(KEYS, max(SMALLEST, TILE_BYTES // (dim * itemsize)), block_size & -block_size)
    if tile < SMALLEST:
        raise ValueError(f"a tile of {SMALLEST} or more keys has to lie in one block, and blocks are of {block_size}: "
                         f"block_size has to be a multiple of {SMALLEST}")
    return tile
