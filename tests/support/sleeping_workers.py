"""Two workers whose weights sleep, over drivers of bookkeeping, with what they say between them: all of it can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xllm_platform.base import AllocatorStats

from tests.support.book_driver import GRANULE, BookDriver
from xllm_npu.memory.coordinator import DistributedVirtualMemoryCoordinator
from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.weight_regions import WeightRegion
from xllm_npu.memory.worker_memory import LocalWorkerMemory, MemoryCall
from xllm_npu.memory.worker_residency import WorkerResidency
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_layout import PageLayout
from xllm_npu.state.messages import KV_CACHE_TAG, WEIGHTS_TAG

LAYOUT = PageLayout(page_bytes=GRANULE, block_bytes=1024, num_pages=6, num_regions=3)
PAGE = LAYOUT.total_page_bytes
WEIGHT_PAGES = (5, 4)  # of the two workers
LOADED = "as loaded"
LOSSES = {  # verb -> whether it is fatal that a worker does not hear it, or is not heard
    "prepare_sleep": False, "commit_sleep": True, "prepare_wake": False, "commit_wake": False, "finish_wake": True,
}  # fmt: skip
Fault = Callable[[str], Exception | None]


class Model:
    """A worker's weights without their bytes: what is in them is a word, and nothing while they have no pages."""

    def __init__(self) -> None:
        self.words: str | None = LOADED
        self.fault: Fault = lambda call: None

    def contents(self, level: int, synchronize: Callable[[], None]) -> Contents:
        return Contents(self, level)

    def empty_cache(self) -> None:
        pass

    empty_host_cache = empty_cache

    def called(self, name: str) -> None:
        error = self.fault(name)
        if error is not None:
            raise error


class Contents:
    def __init__(self, model: Model, level: int) -> None:
        self.model, self.level, self.kept = model, level, ""

    def save(self, region: WeightRegion) -> None:
        self.model.called("save")
        if region.is_mapped:
            assert self.model.words == LOADED
            self.kept = LOADED if self.level == 1 else ""

    def restore(self, region: WeightRegion) -> None:
        assert region.is_mapped
        self.model.words = None
        self.model.called("restore")
        self.model.words = LOADED  # the files have the same
        assert self.level == 2 or self.kept == LOADED


class Wire(LocalWorkerMemory):
    """A worker behind something that may lose a call before it arrives, or its answer."""

    def __init__(self, resources: WorkerMemoryResources) -> None:
        super().__init__(resources)
        self.heard: list[MemoryCall] = []
        self.lose_call: Fault = lambda verb: None
        self.lose_answer: Fault = lambda verb: None
        self._verb = ""

    def start(self, call: MemoryCall) -> None:
        self._verb = call.verb
        error = self.lose_call(call.verb)
        if error is not None:
            raise error
        self.heard.append(call)
        super().start(call)

    def finish(self) -> int:
        answer = super().finish()
        error = self.lose_answer(self._verb)
        if error is not None:
            raise error
        return answer


class Workers:
    def __init__(self, total_pages: int = 100, elastic: bool = True, kv: bool = True) -> None:
        """`total_pages`: virtual pages' worth of memory beside the weights'."""
        self.layout = LAYOUT if kv else None
        self.drivers, self.resources, self.models = [], [], []
        for weight_pages in WEIGHT_PAGES:
            driver = BookDriver((total_pages * LAYOUT.num_regions + max(WEIGHT_PAGES)) * GRANULE)
            growth = GrowthRule(GrowthLimits(total_bytes=driver.total), driver.memory_info,
                                lambda: AllocatorStats(reserved=1, peak_reserved=1))
            resources = WorkerMemoryResources(driver, None, growth if elastic else None, lambda: None,
                                              page_bytes=GRANULE)
            resources.open_weights(weights_of(weight_pages))
            if kv:
                resources.open_kv(LAYOUT)
            model: Any = Model()
            resources.residency = WorkerResidency(resources, model)
            self.drivers.append(driver)
            self.resources.append(resources)
            self.models.append(model)
        self.now = 0.0
        self.wires = [Wire(one) for one in self.resources]
        self.coordinator = DistributedVirtualMemoryCoordinator(
            self.wires, self.layout, lambda: self.now, elastic=elastic, has_weights=True)

    def heal(self) -> None:
        for driver, model, wire in zip(self.drivers, self.models, self.wires):
            driver.fault = model.fault = wire.lose_call = wire.lose_answer = lambda call: None

    def check(self, kv_pages: int, weights: bool) -> None:
        """Every worker has exactly so many virtual pages and its weights or not, and the ledger too."""
        for driver, resources, count, model in zip(self.drivers, self.resources, WEIGHT_PAGES, self.models):
            resources.check_integrity()
            there = kv_pages * LAYOUT.num_regions + (count if weights else 0)
            assert len(driver.mapped) == len(set(driver.mapped.values())) == there, "pages are lost, or mapped twice"
            assert resources.pool.num_taken == there
            assert not resources.elastic or len(driver.pages) == there
            if weights:
                assert model.words == LOADED
        budget = self.coordinator.budget
        budget.check_integrity()
        assert budget.reserved(KV_CACHE_TAG) == kv_pages * LAYOUT.num_regions
        assert budget.reserved(WEIGHTS_TAG) == (max(WEIGHT_PAGES) if weights else 0)


def weights_of(pages: int) -> Any:
    return layout_of(pages * GRANULE - 1)


def layout_of(nbytes: int) -> Any:
    """As large as that; of no weights that anybody looks at."""

    class Layout:
        size = nbytes
        extents: list[tuple[int, int]] = []

    return Layout()


def offsets(*pages: int) -> list[int]:
    return [LAYOUT.offset_of(page) for page in pages]
