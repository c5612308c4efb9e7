"""Growth over several workers: what happens when one refuses, fails, or does not undo; and all of it as a machine."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xllm_platform.base import AllocatorStats, OutOfMemoryError, PlatformError

from tests.support.book_driver import GRANULE, BookDriver, fail_nth
from xllm_npu.memory.coordinator import DistributedVirtualMemoryCoordinator
from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.worker_memory import LocalWorkerMemory, MemoryCall
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageAllocator, PageGrowthRefused
from xllm_npu.state.kv_cache.page_layout import PageLayout
from xllm_npu.state.messages import KV_CACHE_TAG

LAYOUT = PageLayout(page_bytes=GRANULE, block_bytes=1024, num_pages=6, num_regions=3)
PAGE = LAYOUT.total_page_bytes


class Workers:
    """Two workers over book drivers that all regions of all pages would fit into, and their coordinator."""

    def __init__(self, total_pages: int = 100, outside_pages: int = 0) -> None:
        self.drivers = [BookDriver(total_pages * PAGE) for _ in "ab"]
        for driver in self.drivers:
            driver.outside = outside_pages * PAGE
        self.resources = [
            WorkerMemoryResources(
                driver, LAYOUT,
                GrowthRule(GrowthLimits(total_bytes=driver.total), driver.memory_info,
                           lambda: AllocatorStats(reserved=1, peak_reserved=1)),
                lambda: None)
            for driver in self.drivers
        ]
        self.now = 0.0
        self.coordinator = DistributedVirtualMemoryCoordinator(
            [LocalWorkerMemory(one) for one in self.resources], LAYOUT, lambda: self.now)

    def pages_mapped(self) -> list[int]:
        return [len(driver.mapped) // LAYOUT.num_regions for driver in self.drivers]

    def check(self, pages: int) -> None:
        """Every worker has exactly so many virtual pages, and the ledger too."""
        for driver, resources in zip(self.drivers, self.resources):
            resources.check_integrity()
            assert len(driver.mapped) == len(driver.pages) == pages * LAYOUT.num_regions
        self.coordinator.budget.check_integrity()
        assert self.coordinator.budget.reserved(KV_CACHE_TAG) == pages * LAYOUT.num_regions


def offsets(*pages: int) -> list[int]:
    return [LAYOUT.offset_of(page) for page in pages]


def test_rule_43_a_page_is_backed_on_all_workers():
    workers = Workers()
    workers.check(1)  # the pinned one
    workers.coordinator.map(offsets(1, 2))
    workers.check(3)
    workers.coordinator.unmap(offsets(1))
    workers.check(2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["create_page", "map"])
@pytest.mark.parametrize("n", [1, 3])
def test_rule_44_every_worker_is_compensated_before_the_ledger(rank, call, n):
    workers = Workers()
    workers.drivers[rank].fault = fail_nth(call, n)
    release = workers.coordinator.budget.release

    def checked(owner: str, count: int) -> None:
        assert workers.pages_mapped() == [1, 1], "the ledger was first"
        release(owner, count)

    workers.coordinator.budget.release = checked  # type: ignore[method-assign]
    with pytest.raises(PageGrowthRefused):
        workers.coordinator.map(offsets(1))
    workers.check(1)
    workers.coordinator.map(offsets(1))
    workers.check(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_rule_45_a_rollback_that_fails_is_fatal(rank):
    workers = Workers()
    workers.drivers[1 - rank].fault = fail_nth("map", 1)
    workers.drivers[rank].fault = fail_nth("release_page", 1)
    with pytest.raises(MemoryOwnershipLost):
        workers.coordinator.map(offsets(1))


def test_rule_45_so_is_an_unmapping_that_fails_and_the_allocator_says_so_ever_after():
    workers = Workers()
    pages = PageAllocator(LAYOUT, workers.coordinator, preallocate=False)
    taken = [pages.take(), pages.take()]
    workers.drivers[1].fault = fail_nth("unmap", 2)
    with pytest.raises(MemoryOwnershipLost):
        pages.give(taken)
    with pytest.raises(MemoryOwnershipLost):
        pages.take()


def test_rule_40_and_41_memory_is_looked_at_before_backing_and_again_before_publishing():
    workers = Workers()
    workers.coordinator.map(offsets(1))
    driver, worker = workers.drivers[0], workers.resources[0]
    driver.outside = driver.memory_info().free - PAGE + 1
    created = driver.calls.count("create_page")
    with pytest.raises(PageGrowthRefused):
        worker.prepare(7, offsets(2))
    assert driver.calls.count("create_page") == created, "refused before anything was taken"
    driver.outside -= 1
    worker.prepare(8, offsets(2))
    driver.outside += 1
    before = dict(driver.mapped)
    with pytest.raises(PageGrowthRefused):
        worker.commit(8)
    assert driver.mapped == before, "mappings that were there stay"
    assert len(driver.pages) == len(before), "handles that were not published are released"
    worker.check_integrity()


def test_rule_42_memory_that_goes_in_between_is_a_refusal():
    workers = Workers()
    workers.drivers[0].fault = fail_nth("create_page", 2, OutOfMemoryError)
    with pytest.raises(PageGrowthRefused) as caught:
        workers.coordinator.map(offsets(1))
    assert caught.value.reason == "driver"
    workers.check(1)


def test_rule_39_capacity_is_that_of_the_worker_with_the_least():
    workers = Workers()
    workers.drivers[1].outside = workers.drivers[1].total - 4 * PAGE
    workers.now = 1.0
    assert workers.coordinator.growable_pages() == 3  # beside the pinned page
    workers.coordinator.map(offsets(1))
    assert workers.coordinator.growable_pages() == 2


def test_rules_24_and_29_growth_goes_beyond_what_was_free_at_the_start():
    workers = Workers(total_pages=100, outside_pages=97)
    assert workers.coordinator.budget.active == 3 * LAYOUT.num_regions
    workers.coordinator.map(offsets(1, 2))
    with pytest.raises(PageGrowthRefused) as caught:
        workers.coordinator.map(offsets(3))
    assert caught.value.reason == "ledger"
    for driver in workers.drivers:
        driver.outside = 90 * PAGE
    workers.coordinator.map(offsets(3))
    workers.check(4)
    assert workers.coordinator.budget.active > 3 * LAYOUT.num_regions


def test_capacity_is_told_while_pages_are_being_mapped():
    workers = Workers()
    mapping, go_on = threading.Event(), threading.Event()

    def hold(call: str) -> None:
        if call == "map":
            mapping.set()
            assert go_on.wait(20)

    workers.drivers[1].fault = hold
    mapper = threading.Thread(target=workers.coordinator.map, args=(offsets(1),))
    mapper.start()
    assert mapping.wait(20)
    workers.now = 10.0
    assert workers.coordinator.growable_pages() > 0
    go_on.set()
    mapper.join(20)
    workers.check(2)


def test_an_abort_of_what_was_never_heard_of_is_nothing():
    workers = Workers()
    workers.resources[0].abort(99)
    workers.check(1)


def test_everything_goes_back_in_the_end():
    workers = Workers()
    workers.coordinator.map(offsets(1, 4))
    workers.resources[0].prepare(50, offsets(2))
    for driver, resources in zip(workers.drivers, workers.resources):
        resources.close()
        assert (driver.pages, driver.mapped, driver.ranges) == ({}, {}, {})


class MemoryMachine(RuleBasedStateMachine):
    """Pages are taken and given back while drivers fail at any call and memory comes and goes."""

    @initialize(total_pages=st.integers(2, 8))
    def start(self, total_pages):
        self.workers = Workers(total_pages)
        self.pages = PageAllocator(LAYOUT, self.workers.coordinator, preallocate=False)
        self.taken: list[int] = []
        self.lost = False

    @precondition(lambda self: not self.lost)
    @rule()
    def take(self):
        try:
            self.taken.append(self.pages.take())
        except PageGrowthRefused:
            pass
        except MemoryOwnershipLost:
            self.lost = True
        self.heal()

    @precondition(lambda self: not self.lost)
    @rule(data=st.data())
    def give(self, data):
        if not self.taken:
            return
        gone = data.draw(st.lists(st.sampled_from(self.taken), unique=True, min_size=1))
        self.taken = [page for page in self.taken if page not in gone]
        try:
            self.pages.give(gone)
        except MemoryOwnershipLost:
            self.lost = True
        self.heal()

    def heal(self):
        for driver in self.workers.drivers:
            driver.fault = lambda call: None

    @precondition(lambda self: not self.lost)
    @rule(rank=st.integers(0, 1), call=st.sampled_from(("create_page", "map", "unmap", "release_page")),
          n=st.integers(1, 6), error=st.sampled_from((PlatformError, OutOfMemoryError, ValueError)))
    def break_driver(self, rank, call, n, error):
        """The next taking or giving meets it, if it comes that far."""
        self.workers.drivers[rank].fault = fail_nth(call, n, error)

    @precondition(lambda self: not self.lost)
    @rule(rank=st.integers(0, 1), pages=st.integers(0, 8))
    def others_use_memory(self, rank, pages):
        driver = self.workers.drivers[rank]
        driver.outside = min(pages * PAGE, driver.total - sum(driver.pages.values()))
        self.workers.now += 1

    @precondition(lambda self: not self.lost)
    @rule()
    def suspend(self):
        try:
            self.pages.freeze()
            self.pages.thaw()
        except MemoryOwnershipLost:
            self.lost = True
        self.heal()

    @precondition(lambda self: self.lost)
    @rule()
    def lost_for_good(self):
        with pytest.raises(MemoryOwnershipLost):
            self.pages.take()

    @invariant()
    def agrees(self):
        if not hasattr(self, "pages") or self.lost:
            return
        self.pages.check_integrity()
        self.workers.check(self.pages.stats().mapped)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_calls_that_workers_get_are_the_transactions():
    heard: list[MemoryCall] = []
    workers = Workers()
    local = LocalWorkerMemory(workers.resources[0])

    class Spy(LocalWorkerMemory):
        def start(self, call: MemoryCall) -> None:
            heard.append(call)
            super().start(call)

    coordinator = DistributedVirtualMemoryCoordinator([local, Spy(workers.resources[1])], LAYOUT)
    coordinator.map(offsets(2))
    coordinator.unmap(offsets(2))
    assert [(call.verb, call.offsets) for call in heard if call.verb != "growable"] == [
        ("prepare", offsets(2)), ("commit", []), ("unmap", offsets(2))]
