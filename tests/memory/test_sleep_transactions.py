"""Sleep and wake-up over several workers: what happens when one refuses, fails, does not hear or is not heard, and all
of it as a machine beside growth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xllm_platform.base import AllocatorStats, OutOfMemoryError, PlatformError

from tests.support.book_driver import GRANULE, BookDriver, fail_nth
from xllm_npu.memory.coordinator import KV, WEIGHTS, DistributedVirtualMemoryCoordinator, SleepFailed
from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.weight_regions import WeightRegion
from xllm_npu.memory.worker_memory import LocalWorkerMemory, MemoryCall
from xllm_npu.memory.worker_residency import KV_CACHE, WorkerResidency
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageAllocator, PageGrowthRefused
from xllm_npu.state.kv_cache.page_layout import PageLayout

LAYOUT = PageLayout(page_bytes=GRANULE, block_bytes=1024, num_pages=6, num_regions=3)
PAGE = LAYOUT.total_page_bytes
WEIGHT_PAGES = (5, 4)  # of the two workers
LOADED = "as loaded"
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
        assert budget.reserved(KV) == kv_pages * LAYOUT.num_regions
        assert budget.reserved(WEIGHTS) == (max(WEIGHT_PAGES) if weights else 0)


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


@pytest.mark.parametrize("level", [1, 2])
def test_rules_43_and_49_all_workers_sleep_and_wake_in_one_transaction_each(level):
    workers = Workers()
    workers.check(1, True)
    assert workers.coordinator.sleep(level) == (sum(WEIGHT_PAGES) + 2 * LAYOUT.num_regions) * GRANULE
    workers.check(0, False)
    assert [len(driver.ranges) for driver in workers.drivers] == [LAYOUT.num_regions + 1] * 2, "addresses stay"
    workers.coordinator.wake()
    workers.check(1, True)
    for wire in workers.wires:
        said = [(call.verb, call.tags) for call in wire.heard if call.verb not in ("growable", "weight_pages")]
        assert said == [("prepare_sleep", []), ("commit_sleep", []), ("prepare_wake", ["kv_cache", "weights"]),
                        ("commit_wake", []), ("finish_wake", [])]
    workers.coordinator.map(offsets(1))
    workers.check(2, True)


def test_tags_wake_one_after_the_other_and_twice_is_once():
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.coordinator.wake(["weights"])
    workers.check(0, True)
    workers.coordinator.wake(["weights"])
    workers.coordinator.wake(["kv_cache"])
    workers.check(1, True)
    workers.coordinator.wake()
    workers.check(1, True)
    workers.coordinator.sleep(1)
    workers.coordinator.wake(["kv_cache"])
    workers.check(1, False)
    workers.coordinator.sleep(2)
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(1, True)


def test_a_sleeping_model_sleeps_deeper_and_not_lighter():
    workers = Workers()
    workers.coordinator.sleep(1)
    assert workers.coordinator.sleep(2) == 0
    assert [r.residency._kept.level for r in workers.resources] == [2, 2]
    assert workers.coordinator.sleep(1) == 0
    assert [r.residency._kept.level for r in workers.resources] == [2, 2]
    workers.coordinator.wake()
    workers.check(1, True)


def test_rule_7_one_ledger_for_weights_and_kv_cache():
    workers = Workers(total_pages=2)
    budget = workers.coordinator.budget
    assert (budget.reserved(WEIGHTS), budget.reserved(KV)) == (5, 3)
    workers.coordinator.map(offsets(1))
    with pytest.raises(PageGrowthRefused):
        workers.coordinator.map(offsets(2))
    workers.check(2, True)


def test_rule_21_a_fixed_arena_sleeps_too():
    workers = Workers(elastic=False)
    workers.check(LAYOUT.num_pages, True)
    workers.coordinator.sleep(1)
    workers.check(0, False)
    assert not any(driver.pages for driver in workers.drivers)
    workers.coordinator.wake()
    workers.check(LAYOUT.num_pages, True)


def test_rule_5_weights_alone():
    workers = Workers(kv=False)
    workers.check(0, True)
    workers.coordinator.sleep(2)
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(0, True)


def test_pages_of_requests_are_no_state_to_sleep_in():
    workers = Workers()
    workers.coordinator.map(offsets(2))
    with pytest.raises(SleepFailed, match="in use"):
        workers.coordinator.sleep(1)
    workers.check(2, True)
    workers.coordinator.unmap(offsets(2))
    workers.coordinator.sleep(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rule_44_contents_that_cannot_be_kept_leave_all_awake(rank):
    workers = Workers()
    workers.models[rank].fault = fail_nth("save", 1, MemoryError)
    with pytest.raises(SleepFailed):
        workers.coordinator.sleep(1)
    workers.check(1, True)
    assert [r.residency._saved for r in workers.resources] == [None, None], "what was kept is let go"
    workers.coordinator.sleep(1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("call", "n"), [("create_page", 1), ("create_page", 7), ("map", 1), ("map", 5), ("map", 7)])
def test_rule_44_a_wake_up_is_undone_on_all_workers_before_the_ledger(rank, call, n):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.drivers[rank].fault = fail_nth(call, n)
    release = workers.coordinator.budget.release

    def checked(owner: str, count: int) -> None:
        assert [len(driver.mapped) for driver in workers.drivers] == [0, 0], "the ledger was first"
        release(owner, count)

    workers.coordinator.budget.release = checked  # type: ignore[method-assign]
    with pytest.raises(PageGrowthRefused):
        workers.coordinator.wake()
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(1, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_cannot_be_filled_leave_all_asleep(rank):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.models[rank].fault = fail_nth("restore", 1, OSError)
    with pytest.raises(PageGrowthRefused) as caught:
        workers.coordinator.wake()
    assert caught.value.reason == "weights"
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(1, True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["unmap", "release_page"])
@pytest.mark.parametrize("n", [1, 6])
def test_rule_45_a_sleep_that_does_not_give_back_is_fatal(rank, call, n):
    workers = Workers()
    workers.drivers[rank].fault = fail_nth(call, n)
    with pytest.raises(MemoryOwnershipLost):
        workers.coordinator.sleep(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rule_45_a_wake_up_whose_rollback_fails_is_fatal(rank):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.models[1 - rank].fault = fail_nth("restore", 1)
    workers.drivers[rank].fault = fail_nth("release_page", 1)
    with pytest.raises(MemoryOwnershipLost):
        workers.coordinator.wake()


LOSSES = {  # verb -> whether it is fatal that a worker does not hear it, or is not heard
    "prepare_sleep": False, "commit_sleep": True, "prepare_wake": False, "commit_wake": False, "finish_wake": True,
}  # fmt: skip


@pytest.mark.parametrize("verb", LOSSES)
@pytest.mark.parametrize("way", ["lose_call", "lose_answer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rules_44_and_45_calls_and_answers_that_are_lost(verb, way, rank):
    workers = Workers()
    sleeping = "wake" in verb
    if sleeping:
        workers.coordinator.sleep(1)
    setattr(workers.wires[rank], way, fail_nth(verb, 1, TimeoutError))
    expected = MemoryOwnershipLost if LOSSES[verb] else (PageGrowthRefused if sleeping else SleepFailed)
    with pytest.raises(expected):
        workers.coordinator.wake() if sleeping else workers.coordinator.sleep(1)
    if not LOSSES[verb]:
        workers.check(0 if sleeping else 1, not sleeping)
        workers.coordinator.sleep(1)
        workers.coordinator.wake()
        workers.check(1, True)


@pytest.mark.parametrize("way", ["lose_call", "lose_answer"])
def test_rule_45_an_abort_that_is_not_acknowledged_is_fatal(way):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.models[0].fault = fail_nth("restore", 1)
    setattr(workers.wires[1], way, fail_nth("abort", 1, TimeoutError))
    with pytest.raises(MemoryOwnershipLost, match="after a failed"):
        workers.coordinator.wake()
    assert workers.coordinator.budget.reserved(WEIGHTS) == 5, "the reservation stays with what is unknown"


def test_rules_28_and_40_a_wake_up_asks_for_memory_as_growth_does():
    workers = Workers()
    workers.coordinator.sleep(1)
    driver = workers.drivers[1]
    driver.outside = driver.total - (WEIGHT_PAGES[1] + LAYOUT.num_regions) * GRANULE + 1
    created = driver.calls.count("create_page")
    with pytest.raises(PageGrowthRefused) as caught:
        workers.coordinator.wake()
    assert caught.value.reason == "memory"
    assert driver.calls.count("create_page") == created
    workers.check(0, False)
    driver.outside -= 1
    workers.coordinator.wake()
    workers.check(1, True)


def test_everything_goes_back_in_the_end_from_any_state():
    for state in ("awake", "asleep", "half way"):
        workers = Workers()
        if state != "awake":
            workers.coordinator.sleep(1)
        for resources, driver in zip(workers.resources, workers.drivers):
            if state == "half way":
                resources.residency.prepare_wake(9, ["weights", "kv_cache"])
            resources.close()
            assert (driver.pages, driver.mapped, driver.ranges) == ({}, {}, {})


DRIVER_CALLS = ("create_page", "map", "unmap", "release_page")
VERBS = ("prepare", "commit", "abort", "unmap", *LOSSES)
ERRORS = (PlatformError, OutOfMemoryError, ValueError, TimeoutError)


class SleepMachine(RuleBasedStateMachine):
    """Pages are taken and given back and all sleeps and wakes, while drivers, copies, files and the wire fail."""

    @initialize(total_pages=st.integers(2, 8))
    def start(self, total_pages):
        self.workers = Workers(total_pages)
        self.pages = PageAllocator(LAYOUT, self.workers.coordinator, preallocate=False)
        self.taken: list[int] = []
        self.lost = False

    @property
    def awake(self) -> set[str]:
        return self.workers.coordinator.awake

    def attempt(self, action: Callable[[], object], *refusals: type[Exception]) -> bool:
        try:
            action()
            return True
        except refusals:
            return False
        except MemoryOwnershipLost:
            self.lost = True
            return False
        finally:
            self.workers.heal()

    @precondition(lambda self: not self.lost and KV_CACHE in self.awake)
    @rule()
    def take(self):
        self.attempt(lambda: self.taken.append(self.pages.take()), PageGrowthRefused)

    @precondition(lambda self: not self.lost and self.taken)
    @rule(data=st.data())
    def give(self, data):
        gone = data.draw(st.lists(st.sampled_from(self.taken), unique=True, min_size=1))
        self.taken = [page for page in self.taken if page not in gone]
        self.attempt(lambda: self.pages.give(gone))

    @precondition(lambda self: not self.lost and not self.taken)
    @rule(level=st.sampled_from((1, 2)))
    def sleep(self, level):
        was_awake = KV_CACHE in self.awake
        if was_awake and not self.attempt(self.pages.freeze):
            return
        if not self.attempt(lambda: self.workers.coordinator.sleep(level), SleepFailed) and was_awake and not self.lost:
            self.pages.thaw()

    @precondition(lambda self: not self.lost)
    @rule(tags=st.sets(st.sampled_from(("weights", "kv_cache"))))
    def wake(self, tags):
        thaws = KV_CACHE in tags and KV_CACHE not in self.awake
        if self.attempt(lambda: self.workers.coordinator.wake(tags), PageGrowthRefused) and thaws:
            self.pages.thaw()

    @precondition(lambda self: not self.lost)
    @rule(rank=st.integers(0, 1), call=st.sampled_from(DRIVER_CALLS), n=st.integers(1, 9),
          error=st.sampled_from(ERRORS))
    def break_driver(self, rank, call, n, error):
        """The next action meets it, if it comes that far; so with the others."""
        self.workers.drivers[rank].fault = fail_nth(call, n, error)

    @precondition(lambda self: not self.lost)
    @rule(rank=st.integers(0, 1), call=st.sampled_from(("save", "restore")), error=st.sampled_from(ERRORS))
    def break_contents(self, rank, call, error):
        self.workers.models[rank].fault = fail_nth(call, 1, error)

    @precondition(lambda self: not self.lost)
    @rule(rank=st.integers(0, 1), verb=st.sampled_from(VERBS), way=st.sampled_from(("lose_call", "lose_answer")))
    def break_wire(self, rank, verb, way):
        setattr(self.workers.wires[rank], way, fail_nth(verb, 1, TimeoutError))

    @precondition(lambda self: not self.lost)
    @rule(rank=st.integers(0, 1), pages=st.integers(0, 12))
    def others_use_memory(self, rank, pages):
        driver = self.workers.drivers[rank]
        driver.outside = min(pages * PAGE, driver.total - sum(driver.pages.values()))
        self.workers.now += 1

    @precondition(lambda self: self.lost)
    @rule()
    def lost_for_good(self):
        for action in (lambda c: c.sleep(1), lambda c: c.wake(), lambda c: c.map(offsets(1))):
            with pytest.raises(MemoryOwnershipLost):
                action(self.workers.coordinator)

    @invariant()
    def agrees(self):
        if not hasattr(self, "pages") or self.lost:
            return
        self.pages.check_integrity()
        mapped = self.pages.stats().mapped if KV_CACHE in self.awake else 0
        self.workers.check(mapped, "weights" in self.awake)


TestSleep = SleepMachine.TestCase
TestSleep.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
