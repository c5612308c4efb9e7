"""A model's weights in virtual memory: one range of addresses for good, physical pages while the weights are awake.

The range is cut by a layout that was planned before (see xllm_models.weight_memory), weight after weight, so that
tensors and captured graphs keep their addresses whatever happens to the pages. Which physical pages those are does not
matter: they need not be neighbours. Knows bytes and tensors; no model, no checkpoint, no policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

from xllm_npu.memory.mapped_region import MappedVirtualMemoryRegion
from xllm_npu.memory.ownership import undoing
from xllm_npu.memory.physical_pages import PhysicalPagePool

if TYPE_CHECKING:
    import torch
    from xllm_models.weight_memory import WeightLayout

CHUNK_BYTES = 64 * 2**20  # copied at once; a power of two, to which allocators of pinned memory round up


class WeightRegion:
    """A `WeightAllocator` of xllm_models."""

    def __init__(self, pool: PhysicalPagePool, layout: WeightLayout) -> None:
        """Reserves addresses; nothing is mapped yet."""
        self.layout = layout
        self.num_pages = max(1, -(-layout.size // pool.page_bytes))
        self._page_bytes = pool.page_bytes
        self._region = MappedVirtualMemoryRegion(pool, self.num_pages * pool.page_bytes)
        self._handed_out = 0

    @property
    def address(self) -> int:
        return self._region.address

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def is_mapped(self) -> bool:
        return self._region.mapped_bytes > 0

    @property
    def mapped_bytes(self) -> int:
        return self._region.mapped_bytes

    @property
    def complete(self) -> bool:
        """All weights of the layout were handed out."""
        return self._handed_out == len(self.layout.extents)

    def pages(self) -> list[int]:
        """The physical pages, from the first address on."""
        return [self._region.page_at(i * self._page_bytes) for i in range(self.num_pages)] if self.is_mapped else []

    def map(self, pages: Sequence[int]) -> None:
        """Show these physical pages, the first at the lowest address; all or none."""
        done: list[int] = []
        try:
            for i, page in enumerate(pages):
                self._region.map(i * self._page_bytes, page)
                done.append(i * self._page_bytes)
        except BaseException:
            with undoing("A mapping of weights"):
                for offset in done:
                    self._region.unmap(offset)
            raise
        assert len(pages) == self.num_pages

    def unmap(self) -> list[int]:
        """The physical pages that were mapped."""
        return [self._region.unmap(i * self._page_bytes) for i in range(self.num_pages)] if self.is_mapped else []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next weight of the layout. Owns nothing."""
        import torch

        offset, length = self.layout.extents[self._handed_out]
        assert length == math.prod(shape) * dtype.itemsize, "weights are allocated in another order than planned"
        self._handed_out += 1
        if not length:
            return torch.empty(shape, dtype=dtype, device=device)
        return self._region.view(offset, shape, dtype)

    def contains(self, tensor: torch.Tensor) -> bool:
        begin = tensor.data_ptr()
        return not tensor.numel() or self.address <= begin < self.address + self._region.size

    def chunks(self) -> Iterator[torch.Tensor]:
        """All of the layout's bytes, gaps included, a piece at a time: [n] uint8 on the device."""
        import torch

        for offset in range(0, self.layout.size, CHUNK_BYTES):
            yield self._region.view(offset, (min(CHUNK_BYTES, self.layout.size - offset),), torch.uint8)

    def content_hash(self) -> int:
        """xxh3 (64 bits) of every weight's bytes in order; what lies between them does not count."""
        import torch

        found = xxhash.xxh3_64()
        for offset, length in self.layout.extents:
            for begin in range(0, length, CHUNK_BYTES):
                size = min(CHUNK_BYTES, length - begin)
                found.update(self._region.view(offset + begin, (size,), torch.uint8).cpu().numpy().data)
        return found.intdigest()

    def close(self) -> list[int]:
        """Give the addresses back; returns the physical pages. No tensor over it may be used any more."""
        return self._region.close()

    def check_integrity(self) -> None:
        self._region.check_integrity()
        assert self._region.mapped_bytes in (0, self._region.size), "weights are mapped in part"
