"""One worker's KV cache in virtual memory: a region for each K and V of a layer, or each layer's latents.

Regions are alike: map and unmap take a byte offset, virtual page id times page size, and move one physical page in
each of them. A cache's tensor spans its whole region; where no page is mapped it must not be touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xllm_npu.memory.mapped_region import MappedVirtualMemoryRegion
from xllm_npu.memory.ownership import undoing
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.state.kv_cache.page_layout import PageLayout

if TYPE_CHECKING:
    import torch


class VirtualKVCacheRegions:
    def __init__(self, pool: PhysicalPagePool, layout: PageLayout) -> None:
        self._pool, self.layout = pool, layout
        self._regions: list[MappedVirtualMemoryRegion] = []
        self._handed_out = 0
        try:
            for _ in range(layout.num_regions):
                self._regions.append(MappedVirtualMemoryRegion(pool, layout.region_bytes))
        except BaseException:
            self.close()
            raise

    def new_cache(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next region as a tensor; its first dimension is blocks. Owns nothing."""
        assert self._handed_out < len(self._regions), "more caches are made than there are regions"
        assert math.prod(shape[1:]) * dtype.itemsize == self.layout.block_bytes, "blocks are of another size"
        assert shape[0] <= self.layout.num_block_ids
        region = self._regions[self._handed_out]
        self._handed_out += 1
        return region.view(0, shape, dtype)

    def map(self, offset: int, pages: Sequence[int]) -> None:
        """One physical page for each region, all or none mapped."""
        done: list[MappedVirtualMemoryRegion] = []
        try:
            for region, page in zip(self._regions, pages, strict=True):
                region.map(offset, page)
                done.append(region)
        except BaseException:
            with undoing("A mapping"):
                for region in done:
                    region.unmap(offset)
            raise

    def unmap(self, offset: int) -> list[int]:
        """The physical pages that were mapped at the offset."""
        return [region.unmap(offset) for region in self._regions]

    @property
    def mapped_offsets(self) -> list[int]:
        """Byte offsets of the virtual pages that are mapped."""
        return list(self._regions[0].mapped_offsets)

    def zero(self, offset: int) -> None:
        """Clear a page that is mapped, in every region."""
        import torch

        for region in self._regions:
            region.view(offset, (self.layout.page_bytes // 8,), torch.int64).zero_()

    def physical_offsets(self, offset: int) -> list[int]:
        """Where a page lies in the pool's shared mapping, in bytes, for each region."""
        return [region.page_at(offset) * self._pool.page_bytes for region in self._regions]

    def close(self) -> list[int]:
        """Unmap everything; returns the physical pages."""
        pages = [page for region in self._regions for page in region.close()]
        self._regions.clear()
        return pages

    def check_integrity(self) -> None:
        seen: set[int] = set()
        for region in self._regions:
            region.check_integrity()
            pages = set(region._pages.values())
            assert not seen & pages, "a physical page is mapped in two regions"
            seen |= pages
            assert region._pages.keys() == self._regions[0]._pages.keys(), "regions differ in what is mapped"
        assert len(seen) <= self._pool.num_taken
