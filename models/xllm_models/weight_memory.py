"""Where a model's weights lie: one hook that layers call instead of torch.empty.

Inside `allocating_in` weights come from the given allocator; everywhere else each is an allocation of its own.
`WeightLayout` is the arithmetic of one block of memory that holds all of them, one after the other. The same model with
the same settings allocates the same weights in the same order, so a layout can be planned by building the model once
without memory (`WeightLayout.empty` gives meta tensors), and two processes come to the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

ALIGNMENT = 512  # bytes; what caching allocators of accelerators give, and kernels rely on


class WeightAllocator(Protocol):
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised, contiguous tensor."""
        ...


_allocator: ContextVar[WeightAllocator | None] = ContextVar("weight_allocator", default=None)


@contextmanager
def allocating_in(allocator: WeightAllocator) -> Iterator[None]:
    """Weights that this thread allocates inside come from `allocator`."""
    token = _allocator.set(allocator)
    try:
        yield
    finally:
        _allocator.reset(token)


def weights_stay() -> bool:
    """Whether weights allocated now must stay where they are: not packed, not replaced."""
    return _allocator.get() is not None


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    allocator = _allocator.get()
    if allocator is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return allocator.empty(shape, dtype, device)


class WeightLayout:
    """Weights one after the other, each at a multiple of ALIGNMENT bytes."""

    def __init__(self) -> None:
        self.extents: list[tuple[int, int]] = []  # (offset, bytes) of each weight in order of allocation
        self.size = 0

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The offset of the next weight."""
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        length = math.prod(shape) * dtype.itemsize
        self.extents.append((offset, length))
        self.size = offset + length
        return offset

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A place, and no memory."""
        self.place(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")
