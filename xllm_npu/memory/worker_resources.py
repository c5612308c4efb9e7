"""One worker's memory: the physical pages of its device, the KV regions over them, and transactions on both.

Growth goes prepare, commit, or abort. Preparing checks the device and takes physical pages; committing checks again and
maps them; aborting undoes either, and may be asked for a transaction of which nothing was heard. Knows no RPC and
no other worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from xllm_platform.base import OutOfMemoryError, PlatformError, VirtualMemoryDriver

from xllm_npu.memory.growth import GrowthRule
from xllm_npu.memory.kv_regions import VirtualKVCacheRegions
from xllm_npu.memory.ownership import undoing
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageGrowthRefused
from xllm_npu.state.kv_cache.page_layout import PageLayout


class WorkerMemoryResources:
    def __init__(
        self, driver: VirtualMemoryDriver, layout: PageLayout, growth: GrowthRule | None,
        synchronize: Callable[[], None], select_device: Callable[[], None] = lambda: None,
    ) -> None:
        """`growth` None: a fixed arena, resident and mapped from now on; else only the page of the dummy block is.

        `synchronize` waits for the device's work; `select_device` is called once by each thread that comes. Raises
        OutOfMemoryError or PageGrowthRefused if that does not fit.
        """
        self.layout = layout
        self.pool = PhysicalPagePool(driver, layout.page_bytes, layout.num_pages * layout.num_regions,
                                     elastic=growth is not None)
        self.kv = VirtualKVCacheRegions(self.pool, layout)
        self._growth, self._synchronize, self._select_device = growth, synchronize, select_device
        self._thread = threading.local()
        self._zero = not driver.new_pages_are_zero
        self._lock = threading.RLock()
        self._prepared: dict[int, tuple[list[int], list[list[int]]]] = {}  # transaction -> offsets, pages of each
        self._committed: tuple[int, list[int]] = (-1, [])  # the last one that was, and its offsets
        if growth is not None:
            growth.check(layout.total_page_bytes, 0)
        for page in range(layout.num_pages) if growth is None else (PINNED_PAGE,):
            self._publish([layout.offset_of(page)], [self.pool.take(layout.num_regions)])

    @property
    def elastic(self) -> bool:
        return self._growth is not None

    @property
    def committed_bytes(self) -> int:
        return self.pool.resident_bytes

    def growable_pages(self) -> int:
        """Virtual pages that this device would still back now."""
        if self._growth is None:
            return 0
        self._enter()
        with self._lock:
            return max(0, self._growth.growable_bytes(self.committed_bytes) // self.layout.total_page_bytes)

    def prepare(self, transaction: int, offsets: Sequence[int]) -> None:
        """Take physical pages for these offsets. Raises PageGrowthRefused, and then has taken none."""
        assert self._growth is not None, "a fixed arena does not grow"
        self._enter()
        with self._lock:
            self._growth.check(len(offsets) * self.layout.total_page_bytes, self.committed_bytes)
            regions = self.layout.num_regions
            try:
                pages = self.pool.take(len(offsets) * regions)
            except OutOfMemoryError as error:
                raise PageGrowthRefused("driver", str(error)) from error
            grouped = [pages[i : i + regions] for i in range(0, len(pages), regions)]
            self._prepared[transaction] = list(offsets), grouped

    def commit(self, transaction: int) -> None:
        """Map what was prepared. Raises PageGrowthRefused, and then nothing is left of the transaction."""
        assert self._growth is not None
        self._enter()
        with self._lock:
            offsets, pages = self._prepared[transaction]
            try:
                self._growth.check(0, self.committed_bytes)
                self._publish(offsets, pages)
            except (PageGrowthRefused, PlatformError) as error:
                self.abort(transaction)
                if isinstance(error, PageGrowthRefused):
                    raise
                raise PageGrowthRefused("driver", str(error)) from error
            del self._prepared[transaction]
            self._committed = transaction, offsets

    def abort(self, transaction: int) -> None:
        """Undo a transaction, whether it was prepared, committed last, or never heard of."""
        self._enter()
        with self._lock, undoing("A growth"):
            offsets, pages = self._prepared.pop(transaction, ([], []))
            self.pool.give([page for group in pages for page in group])
            if self._committed[0] == transaction:
                offsets = self._committed[1]
                self._committed = (-1, [])
                self.unmap(offsets)

    def unmap(self, offsets: Sequence[int]) -> None:
        """Give back the memory of these pages, which no work to come uses."""
        if not offsets:
            return
        self._enter()
        self._synchronize()  # work that was submitted may still run
        with self._lock:
            for offset in offsets:
                self.pool.give(self.kv.unmap(offset))

    def _enter(self) -> None:
        """Devices are selected a thread at a time, and calls come from several."""
        if not getattr(self._thread, "entered", False):
            self._select_device()
            self._thread.entered = True

    def _publish(self, offsets: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        done: list[int] = []
        try:
            for offset, group in zip(offsets, pages, strict=True):
                self.kv.map(offset, group)
                done.append(offset)
            if self._zero:
                for offset in offsets:
                    self.kv.zero(offset)
                self._synchronize()
        except BaseException:
            with undoing("A mapping"):
                for offset in done:
                    self.kv.unmap(offset)
            raise

    def close(self) -> None:
        """Give everything back; no tensor over it may be used any more."""
        self._enter()
        with self._lock:
            self._synchronize()
            for transaction in list(self._prepared):
                self.abort(transaction)
            self.pool.give(self.kv.close())
            self.pool.close()

    def check_integrity(self) -> None:
        with self._lock:
            self.pool.check_integrity()
            self.kv.check_integrity()
            prepared = sum(len(group) for _, pages in self._prepared.values() for group in pages)
            mapped = sum(region.mapped_bytes for region in self.kv._regions) // self.layout.page_bytes
            assert self.pool.num_taken == prepared + mapped, "physical pages are taken and not mapped"
