"""Growth, sleep and wake-up as a machine, while drivers, copies, files and what workers say and hear fail."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xllm_platform.base import OutOfMemoryError, PlatformError

from tests.support.book_driver import fail_nth
from tests.support.sleeping_workers import LAYOUT, LOSSES, Workers, offsets
from xllm_npu.memory.coordinator import SleepFailed
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.state.kv_cache.page_allocator import PageAllocator, PageGrowthRefused
from xllm_npu.state.messages import KV_CACHE_TAG

PAGE = LAYOUT.total_page_bytes
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

    @precondition(lambda self: not self.lost and KV_CACHE_TAG in self.awake)
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
        was_awake = KV_CACHE_TAG in self.awake
        if was_awake and not self.attempt(self.pages.freeze):
            return
        if not self.attempt(lambda: self.workers.coordinator.sleep(level), SleepFailed) and was_awake and not self.lost:
            self.pages.thaw()

    @precondition(lambda self: not self.lost)
    @rule(tags=st.sets(st.sampled_from(("weights", "kv_cache"))))
    def wake(self, tags):
        thaws = KV_CACHE_TAG in tags and KV_CACHE_TAG not in self.awake
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
        mapped = self.pages.stats().mapped if KV_CACHE_TAG in self.awake else 0
        self.workers.check(mapped, "weights" in self.awake)


TestSleep = SleepMachine.TestCase
TestSleep.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
