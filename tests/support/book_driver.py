"""A `VirtualMemoryDriver` of pure bookkeeping: strict about every call, with faults at calls that the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from xllm_platform.base import MemoryInfo, OutOfMemoryError, PlatformError, VirtualMemoryDriver

GRANULE = 4096


class BookDriver(VirtualMemoryDriver):
    new_pages_are_zero = True
    granularity = GRANULE

    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.outside = 0  # bytes that others use
        self.pages: dict[int, int] = {}  # handle -> size
        self.mapped: dict[int, int] = {}  # address -> handle
        self.ranges: dict[int, int] = {}
        self.calls: list[str] = []
        self.fault: Callable[[str], Exception | None] = lambda call: None  # asked at every call
        self._next = 0

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=self.total - self.outside - sum(self.pages.values()), total=self.total)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        error = self.fault(name)
        if error is not None:
            raise error

    def reserve(self, size: int) -> int:
        self._called("reserve")
        self._next += 1
        address = self._next << 40
        self.ranges[address] = size
        return address

    def free_range(self, address: int) -> None:
        self._called("free_range")
        size = self.ranges[address]
        assert not [a for a in self.mapped if address <= a < address + size], "pages are mapped in the range"
        del self.ranges[address]

    def create_page(self, size: int) -> int:
        self._called("create_page")
        if size > self.memory_info().free:
            raise OutOfMemoryError("no memory is left")
        self._next += 1
        self.pages[self._next] = size
        return self._next

    def release_page(self, page: int) -> None:
        self._called("release_page")
        assert page not in self.mapped.values(), "a mapped page is released"
        del self.pages[page]

    def map(self, address: int, page: int) -> None:
        self._called("map")
        assert address not in self.mapped
        assert page in self.pages
        assert any(start <= address < start + size for start, size in self.ranges.items())
        self.mapped[address] = page

    def unmap(self, address: int) -> None:
        self._called("unmap")
        del self.mapped[address]

    def view(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise PlatformError("there is nothing to see")


def fail_nth(call: str, n: int, error: type[Exception] = PlatformError) -> Callable[[str], Exception | None]:
    """The n-th (from 1) of these calls fails, once."""
    left = n

    def fault(name: str) -> Exception | None:
        nonlocal left
        left -= name == call
        return error(f"{call} failed, as the test says") if name == call and left == 0 else None

    return fault
