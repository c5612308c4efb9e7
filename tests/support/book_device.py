"""A device that several processes have pages on, by bookkeeping: a page is there for as long as one of them has it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from xllm_platform.base import MemoryInfo, PlatformError

from tests.support.book_driver import BookDriver


@dataclass(slots=True)
class BookDevice:
    total: int
    sizes: dict[int, int] = field(default_factory=dict)  # physical page -> bytes
    holders: dict[int, int] = field(default_factory=dict)  # physical page -> processes that have it
    names: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def used(self) -> int:
        return sum(self.sizes.values())

    def drop(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page], self.sizes[page]


class SharingBookDriver(BookDriver):
    """One process's driver. What it exports is the physical page's number."""

    def __init__(self, device: BookDevice) -> None:
        super().__init__(device.total)
        self.device = device
        self.physical: dict[int, int] = {}  # handle -> physical page
        self.imported: set[int] = set()

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=self.device.total - self.device.used, total=self.device.total)

    def create_page(self, size: int) -> int:
        handle = super().create_page(size)
        page = next(self.device.names)
        self.physical[handle] = page
        self.device.sizes[page], self.device.holders[page] = size, 1
        return handle

    def release_page(self, page: int) -> None:
        super().release_page(page)
        self.imported.discard(page)
        self.device.drop(self.physical.pop(page))

    def export_page(self, page: int, importer: int) -> int:
        self._called("export_page")
        assert page not in self.imported, "another process's page is exported"
        return self.physical[page]

    def import_page(self, exported: int, size: int) -> int:
        self._called("import_page")
        if exported not in self.device.sizes:
            raise PlatformError("the page has gone")
        assert self.device.sizes[exported] == size
        self._next += 1
        self.pages[self._next], self.physical[self._next] = size, exported
        self.imported.add(self._next)
        self.device.holders[exported] += 1
        return self._next

    def end(self) -> None:
        """As the system does when a process is killed."""
        for page in self.physical.values():
            self.device.drop(page)
        self.physical.clear()
