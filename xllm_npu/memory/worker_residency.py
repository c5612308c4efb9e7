"""One worker's sleep and wake-up: its part of transactions over the weights and the KV cache of its device.

Sleep goes prepare (contents are kept), commit (pages go back); wake-up prepare (physical pages are taken), commit
(mapped and filled), finish (what was kept is let go). Until it is committed either can be aborted, a wake-up also after
that; then everything is as before. Pages that cannot be given back are fatal. Knows no RPC and no other worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from xllm_platform.base import OutOfMemoryError, PlatformError

from xllm_npu.memory.ownership import MemoryOwnershipLost, undoing
from xllm_npu.memory.weight_contents import KeptContents, SleepOptions, on_its_own_thread
from xllm_npu.memory.weight_import import WeightsUnavailable
from xllm_npu.memory.weight_regions import WeightRegion
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.messages import KV_CACHE_TAG, WEIGHTS_TAG

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _WakeUp:
    transaction: int
    weight_pages: list[int] = field(default_factory=list)
    kv_offsets: list[int] = field(default_factory=list)
    kv_pages: list[list[int]] = field(default_factory=list)  # of each offset
    weights_mapped: bool = False
    kv_mapped: bool = False
    imported: bool = False  # the weight pages, which are filled


class WorkerResidency:
    def __init__(self, resources: WorkerMemoryResources, options: SleepOptions) -> None:
        """The weights are loaded, and everything is mapped."""
        assert resources.weights is not None
        self.resources, self._options = resources, options
        self.stepping = threading.Lock()  # who runs steps holds it: the tail of one that rank 0 has ended may still run
        self._weights: WeightRegion = resources.weights
        self._saved: tuple[int, KeptContents] | None = None  # by a sleep that is prepared
        self._kept: KeptContents | None = None  # contents of weights that are asleep
        self._wake_up: _WakeUp | None = None

    def prepare_sleep(self, transaction: int, level: int) -> None:
        """Keep the contents. What it raises means that this worker cannot sleep, and nothing has changed."""
        r = self.resources
        with r.exclusive():
            r.check_kv_at_rest()
            if not self._weights.is_mapped and self._kept is not None and level == 1:
                self._saved = transaction, self._kept  # what is dropped stays so
                return
            r.synchronize()
            contents = self._options.contents(level, r.synchronize)
            try:
                on_its_own_thread(r.on_device(lambda: contents.save(self._weights)))
            except BaseException:
                self._options.empty_host_cache()
                raise
            self._saved = transaction, contents

    def commit_sleep(self, transaction: int) -> int:
        """Give all pages back; returns their bytes. Raises MemoryOwnershipLost."""
        r = self.resources
        with self.stepping, r.exclusive(), undoing("A sleep"):
            assert self._saved is not None
            assert self._saved[0] == transaction
            r.synchronize()
            before = r.pool.resident_bytes
            r.pool.give(self._weights.unmap(), release=True)
            if r.importer is not None:
                r.importer.release()
            r.drop_kv()
            self._kept, self._saved = self._saved[1], None
            self._options.empty_cache()
            return before - r.pool.resident_bytes

    def prepare_wake(self, transaction: int, tags: Collection[str]) -> None:
        """Take physical pages for all that is asleep of `tags`. Raises PageGrowthRefused, and then has taken none."""
        r = self.resources
        with r.exclusive():
            weights = self._weights.num_pages if WEIGHTS_TAG in tags and not self._weights.is_mapped else 0
            offsets = r.kv_offsets_at_rest if KV_CACHE_TAG in tags and not r.kv_is_mapped else []
            imported = self._import() if weights else []
            own = weights - len(imported)
            try:
                r.check_growth((own + len(offsets) * r.num_regions) * r.pool.page_bytes)
                pages = r.pool.take(own + len(offsets) * r.num_regions)
            except BaseException as error:
                self._give_imported(imported)
                if isinstance(error, OutOfMemoryError):
                    raise PageGrowthRefused("driver", str(error)) from error
                raise
            kv = pages[own:]
            grouped = [kv[i : i + r.num_regions] for i in range(0, len(kv), max(1, r.num_regions))]
            self._wake_up = _WakeUp(transaction, imported or pages[:own], list(offsets), grouped,
                                    imported=bool(imported))

    def _import(self) -> list[int]:
        """The pages of another process's weights, where this one shares them and they can be had; else none."""
        importer = self.resources.importer
        if importer is None:
            return []
        try:
            return importer.take(self._weights)
        except WeightsUnavailable as error:
            log.info("the weights are loaded, not shared: %s", error)
            return []

    def _give_imported(self, pages: list[int]) -> None:
        if pages and self.resources.importer is not None:
            with undoing("A wake-up"):
                self.resources.pool.give(pages)
                self.resources.importer.release()

    def commit_wake(self, transaction: int) -> None:
        """Map and fill. Raises PageGrowthRefused, and then nothing is left of the wake-up."""
        r, wake = self.resources, self._wake_up
        assert wake is not None
        assert wake.transaction == transaction
        with r.exclusive():
            try:
                r.check_growth(0)
                self._map(wake)
                if wake.weights_mapped and not wake.imported and self._kept is not None:
                    kept = self._kept
                    on_its_own_thread(r.on_device(lambda: kept.restore(self._weights)))
            except MemoryOwnershipLost:
                raise
            except Exception as error:
                self.abort(transaction)
                if isinstance(error, PageGrowthRefused):
                    raise
                reason = "driver" if isinstance(error, PlatformError) else "weights"
                raise PageGrowthRefused(reason, f"Waking up failed: {error}") from error

    def _map(self, wake: _WakeUp) -> None:
        if wake.weight_pages:
            self._weights.map(wake.weight_pages)
            wake.weights_mapped = True
        if wake.kv_offsets:
            self.resources.publish_kv(wake.kv_offsets, wake.kv_pages)
            wake.kv_mapped = True

    def finish_wake(self, transaction: int) -> None:
        """All workers are awake: let go of what was kept. May be told of a wake-up that was aborted."""
        with self.resources.exclusive():
            wake = self._wake_up
            if wake is None or wake.transaction != transaction:
                return
            if wake.weights_mapped:
                self._kept = None
                self._options.empty_host_cache()
            self._wake_up = None

    def abort(self, transaction: int) -> None:
        """Undo a sleep that was prepared or a wake-up that is not finished; others are none of its business."""
        r = self.resources
        with r.exclusive(), undoing("A wake-up"):
            if self._saved is not None and self._saved[0] == transaction:
                self._saved = None
                self._options.empty_host_cache()
            wake = self._wake_up
            if wake is None or wake.transaction != transaction:
                return
            self._wake_up = None
            if wake.weights_mapped:
                r.synchronize()
                self._weights.unmap()
            if wake.kv_mapped:
                r.synchronize()
                r.unpublish_kv(wake.kv_offsets)
            if wake.imported:
                self._give_imported(wake.weight_pages)
                wake.weight_pages = []
            r.pool.give([*wake.weight_pages, *(page for group in wake.kv_pages for page in group)], release=True)

    def weights_hash(self) -> int:
        """Of the contents, 64 bits. Raises RuntimeError while weights are asleep."""
        if not self._weights.is_mapped:
            raise RuntimeError("The weights are asleep.")
        with self.resources.exclusive():
            self.resources.synchronize()
            found: list[int] = []
            on_its_own_thread(self.resources.on_device(lambda: found.append(self._weights.content_hash())))
        return found[0]

    def give_up(self) -> None:
        """The worker ends: undo what is under way."""
        if self._wake_up is not None:
            self.abort(self._wake_up.transaction)

    @property
    def pages_in_transit(self) -> int:
        """Physical pages that are taken and not mapped."""
        wake = self._wake_up
        if wake is None:
            return 0
        kv = 0 if wake.kv_mapped else sum(map(len, wake.kv_pages))
        return kv + (0 if wake.weights_mapped else len(wake.weight_pages))
