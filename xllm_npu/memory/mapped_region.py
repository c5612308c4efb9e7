"""A range of addresses into which physical pages are mapped, by byte offset.

Owns the range, not the pages. Tensors over it (`view`) own nothing: they are good for as long as the region is, and
where pages are mapped. Knows bytes; no shapes of caches, no policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from xllm_npu.memory.physical_pages import PhysicalPagePool

if TYPE_CHECKING:
    import torch


class MappedVirtualMemoryRegion:
    def __init__(self, pool: PhysicalPagePool, size: int) -> None:
        """`size` bytes of addresses, a multiple of the pool's pages."""
        assert size > 0
        assert size % pool.page_bytes == 0
        self.size = size
        self._pool = pool
        self.address = pool.driver.reserve(size)
        self._pages: dict[int, int] = {}  # byte offset -> physical page

    @property
    def mapped_bytes(self) -> int:
        return len(self._pages) * self._pool.page_bytes

    @property
    def mapped_offsets(self) -> Iterable[int]:
        return self._pages.keys()

    def page_at(self, offset: int) -> int:
        """The physical page that is mapped at a byte offset."""
        return self._pages[offset]

    def map(self, offset: int, page: int) -> None:
        """Show a physical page at a byte offset, a multiple of the page size at which nothing is mapped."""
        assert 0 <= offset < self.size
        assert offset % self._pool.page_bytes == 0
        assert offset not in self._pages, f"offset {offset} is mapped"
        self._pool.driver.map(self.address + offset, self._pool.handle(page))
        self._pages[offset] = page

    def unmap(self, offset: int) -> int:
        """End a mapping; returns the physical page."""
        self._pool.driver.unmap(self.address + offset)
        return self._pages.pop(offset)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._pool.driver.view(self.address + offset, shape, dtype)

    def close(self) -> list[int]:
        """Unmap everything and give the addresses back; returns the physical pages."""
        pages = [self.unmap(offset) for offset in sorted(self._pages)]
        self._pool.driver.free_range(self.address)
        return pages

    def check_integrity(self) -> None:
        assert len(set(self._pages.values())) == len(self._pages), "a page is mapped twice in one region"
        for page in self._pages.values():
            self._pool.handle(page)
