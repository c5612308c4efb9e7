"""One worker's memory: the physical pages of its device, weights and KV regions over them, and growth of the latter.

Growth goes prepare, commit, or abort. Preparing checks the device and takes physical pages; committing checks again and
maps them; aborting undoes either, and may be asked for a transaction of which nothing was heard. Sleep and wake-up are
worker_residency.py's, over the same pages. Knows no RPC and no other worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from xllm_platform.base import OutOfMemoryError, PlatformError, VirtualMemoryDriver

from xllm_npu.memory.device_ledger import DeviceLedger
from xllm_npu.memory.growth import GrowthRule
from xllm_npu.memory.kv_regions import VirtualKVCacheRegions
from xllm_npu.memory.ownership import undoing
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.memory.weight_regions import WeightRegion
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageGrowthRefused
from xllm_npu.state.kv_cache.page_layout import PageLayout

if TYPE_CHECKING:
    from xllm_models.weight_memory import WeightLayout

    from xllm_npu.memory.weight_export import WeightExporter
    from xllm_npu.memory.weight_import import WeightImporter
    from xllm_npu.memory.worker_residency import WorkerResidency


class WorkerMemoryResources:
    def __init__(
        self, driver: VirtualMemoryDriver, layout: PageLayout | None, growth: GrowthRule | None,
        synchronize: Callable[[], None], select_device: Callable[[], None] = lambda: None, *, page_bytes: int = 0,
        ledger: DeviceLedger | None = None,
    ) -> None:
        """`growth` None: fixed arenas, resident from the start. With a `layout` the KV cache is opened at once.

        Without one there is nothing yet but a pool of pages of `page_bytes`. `synchronize` waits for the device's work;
        `select_device` is called once by each thread that comes; `ledger`, the device's, is closed with this. Raises
        what `open_kv` raises.
        """
        self.pool = PhysicalPagePool(driver, layout.page_bytes if layout else page_bytes, 0, elastic=growth is not None,
                                     ledger=ledger)
        self._ledger = ledger
        self.weights: WeightRegion | None = None
        self.residency: WorkerResidency | None = None  # where weights are in virtual memory and can sleep
        self.importer: WeightImporter | None = None  # where they are another process's
        self.exporter: WeightExporter | None = None  # where other processes may have them
        self._layout: PageLayout | None = None
        self._kv: VirtualKVCacheRegions | None = None
        self._growth, self._synchronize, self._select_device = growth, synchronize, select_device
        self._thread = threading.local()
        self._zero = not driver.new_pages_are_zero
        self._lock = threading.RLock()
        self._prepared: dict[int, tuple[list[int], list[list[int]]]] = {}  # transaction -> offsets, pages of each
        self._committed: tuple[int, list[int]] = (-1, [])  # the last one that was, and its offsets
        if layout is not None:
            self.open_kv(layout)

    # What there is

    def open_weights(self, layout: WeightLayout, importer: WeightImporter | None = None) -> WeightRegion:
        """Addresses and pages for weights, before the KV cache is opened; by `importer` those of another process, with
        the weights in them. Raises OutOfMemoryError or PageGrowthRefused if they do not fit, or WeightsUnavailable.
        """
        assert self.weights is None
        assert self._kv is None
        region = WeightRegion(self.pool, layout)
        try:
            if importer is None:
                self.check_growth(region.num_pages * self.pool.page_bytes)
                self.pool.extend(region.num_pages)
                pages = self.pool.take(region.num_pages)
            else:
                pages = importer.take(region)
            try:
                region.map(pages)
            except BaseException:
                self.pool.give(pages)
                if importer is not None:
                    importer.release()
                raise
        except BaseException:
            region.close()
            raise
        self.weights, self.importer = region, importer
        return region

    def open_kv(self, layout: PageLayout) -> VirtualKVCacheRegions:
        """A fixed cache is mapped from now on; of an elastic one only the page of the dummy block is. Raises
        OutOfMemoryError or PageGrowthRefused if that does not fit.
        """
        assert layout.page_bytes == self.pool.page_bytes
        self.check_growth(layout.total_page_bytes)
        self.pool.extend(layout.num_pages * layout.num_regions)
        self._layout, self._kv = layout, VirtualKVCacheRegions(self.pool, layout)
        for offset in self.kv_offsets_at_rest:
            pages = self.pool.take(layout.num_regions)
            try:
                self.publish_kv([offset], [pages])
            except BaseException:
                self.pool.give(pages)
                raise
        return self._kv

    @property
    def layout(self) -> PageLayout:
        """Of the KV cache, which is in virtual memory."""
        assert self._layout is not None
        return self._layout

    @property
    def kv(self) -> VirtualKVCacheRegions:
        assert self._kv is not None
        return self._kv

    @property
    def has_kv(self) -> bool:
        return self._kv is not None

    @property
    def num_regions(self) -> int:
        """Physical pages of one virtual page of the KV cache; 0 without one."""
        return 0 if self._layout is None else self._layout.num_regions

    @property
    def elastic(self) -> bool:
        return self._growth is not None

    @property
    def growth(self) -> GrowthRule | None:
        return self._growth

    @property
    def takes_calls(self) -> bool:
        """Whether pages come or go while the worker runs."""
        return self.elastic or self.weights is not None

    @property
    def committed_bytes(self) -> int:
        return self.pool.resident_bytes

    # Growth of the KV cache

    def growable_bytes(self) -> int:
        """What this device would still give now; 0 where nothing grows."""
        if self._growth is None:
            return 0
        self._enter()
        with self._lock:
            return max(0, self._growth.growable_bytes(self.committed_bytes))

    def growable_pages(self) -> int:
        """Virtual pages that this device would still back now."""
        return self.growable_bytes() // self.layout.total_page_bytes if self.has_kv else 0

    def check_growth(self, more: int) -> None:
        """Raises PageGrowthRefused unless `more` bytes may be taken. With 0: that what was taken leaves enough."""
        if self._growth is not None:
            self._growth.check(more, self.committed_bytes)

    def prepare(self, transaction: int, offsets: Sequence[int]) -> None:
        """Take physical pages for these offsets. Raises PageGrowthRefused, and then has taken none."""
        assert self._growth is not None, "a fixed arena does not grow"
        self._enter()
        with self._lock:
            self.check_growth(len(offsets) * self.layout.total_page_bytes)
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
                self.check_growth(0)
                self.publish_kv(offsets, pages)
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

    # For sleep and wake-up

    @property
    def kv_offsets_at_rest(self) -> list[int]:
        """What is mapped of the KV cache while no request is there."""
        if self._layout is None:
            return []
        pages = (PINNED_PAGE,) if self.elastic else range(self._layout.num_pages)
        return [self._layout.offset_of(page) for page in pages]

    @property
    def kv_is_mapped(self) -> bool:
        return self._kv is not None and bool(self._kv.mapped_offsets)

    def check_kv_at_rest(self) -> None:
        """Raises RuntimeError if there are pages of requests."""
        if self.kv_is_mapped and sorted(self.kv.mapped_offsets) != self.kv_offsets_at_rest:
            raise RuntimeError("Pages of the KV cache are in use.")

    def drop_kv(self) -> None:
        """Give all pages of the KV cache back, in a fixed arena too."""
        if self._kv is not None:
            for offset in self._kv.mapped_offsets:
                self.pool.give(self._kv.unmap(offset), release=True)

    def publish_kv(self, offsets: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Map pages that were taken, and clear them where the driver does not; all or none."""
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
                self.unpublish_kv(done)
            raise

    def unpublish_kv(self, offsets: Sequence[int]) -> None:
        """End mappings; the pages stay taken."""
        for offset in offsets:
            self.kv.unmap(offset)

    def synchronize(self) -> None:
        self._synchronize()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody else changes anything meanwhile; the device is selected."""
        self._enter()
        with self._lock:
            yield

    def on_device(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` for a thread that has not selected the device."""

        def run() -> None:
            self._select_device()
            work()

        return run

    def _enter(self) -> None:
        """Devices are selected a thread at a time, and calls come from several."""
        if not getattr(self._thread, "entered", False):
            self._select_device()
            self._thread.entered = True

    def close(self) -> None:
        """Give everything back; no tensor over it may be used any more."""
        if self.exporter is not None:  # its thread may wait for the lock
            self.exporter.close()
        self._enter()
        with self._lock:
            self._synchronize()
            if self.residency is not None:
                self.residency.give_up()
            for transaction in list(self._prepared):
                self.abort(transaction)
            for region in (self._kv, self.weights):
                if region is not None:
                    self.pool.give(region.close())
            if self.importer is not None:
                self.importer.release()
            self.pool.close()
            if self._ledger is not None:
                self._ledger.close()

    def check_integrity(self) -> None:
        with self._lock:
            self.pool.check_integrity()
            prepared = sum(len(group) for _, pages in self._prepared.values() for group in pages)
            mapped = 0
            if self._kv is not None:
                self._kv.check_integrity()
                mapped += len(self._kv.mapped_offsets) * self.num_regions
            if self.weights is not None:
                self.weights.check_integrity()
                mapped += len(self.weights.pages())
            moving = 0 if self.residency is None else self.residency.pages_in_transit
            assert self.pool.num_taken == prepared + mapped + moving, "physical pages are taken and not mapped"
