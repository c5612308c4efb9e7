"""The page allocator's rules one by one, with its thread and without, and as a state machine with refusals."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.page_backend import ScriptedBackend, small_layout
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageAllocator, PageGrowthRefused


def allocator(num_pages: int = 64, most: int | None = None, preallocate: bool = False):
    backend = ScriptedBackend(small_layout(num_pages, 8), most)
    return PageAllocator(backend.layout, backend, preallocate=preallocate), backend


def test_rule_53_the_backend_is_told_offsets():
    pages, backend = allocator()
    first, second = pages.take(), pages.take()
    assert backend.calls == [("map", [first * 512]), ("map", [second * 512])]
    pages.give([first, second])
    assert backend.calls[2:] == [("unmap", [first * 512, second * 512])]


def test_rule_18_pages_are_unmapped_when_the_last_one_returns():
    pages, backend = allocator()
    taken = [pages.take() for _ in range(20)]
    pages.give(taken[:19])
    assert len(backend.mapped) > 2, "while pages are in use, some that come back stay in reserve"
    pages.give(taken[19:])
    assert backend.mapped == {PINNED_PAGE}
    pages.check_integrity()


def test_rule_19_the_page_of_the_dummy_block_is_never_given_out_or_back():
    pages, _ = allocator(num_pages=4)
    assert sorted(pages.take() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(AssertionError, match="pinned"):
        pages.give([PINNED_PAGE])


def test_refused_growth_leaves_everything_as_it_was_and_is_counted():
    pages, backend = allocator(most=3)
    held = [pages.take(), pages.take()]
    assert pages.num_available == 0
    for _ in range(2):
        with pytest.raises(PageGrowthRefused, match="as the test says"):
            pages.take()
    assert pages.stats().refusals == {"memory": 2}
    pages.check_integrity()
    backend.most = 10
    assert pages.num_available == 7
    pages.give([*held, pages.take()])
    pages.check_integrity()


def test_all_pages_taken():
    pages, _ = allocator(num_pages=3)
    pages.take(), pages.take()
    with pytest.raises(PageGrowthRefused) as caught:
        pages.take()
    assert caught.value.reason == "virtual"


def filled(pages: PageAllocator) -> int:
    pages._changed.acquire()
    try:
        while len(pages._reserved) < pages._least and not pages._refused:
            assert pages._changed.wait(20), "the thread does not fill the reserve"
        return len(pages._reserved)
    finally:
        pages._changed.release()


def test_the_thread_keeps_between_8_and_32_pages_in_reserve_while_pages_are_used():
    pages, backend = allocator(num_pages=300, preallocate=True)
    pages.wait_settled()
    assert backend.mapped == {PINNED_PAGE}, "nothing is in reserve while nothing is used"
    taken = [pages.take()]
    assert filled(pages) == 8
    taken += [pages.take() for _ in range(60)]
    filled(pages)
    pages.give(taken[1:])
    pages.wait_settled()
    assert 8 <= pages.stats().reserved <= 32
    pages.give(taken[:1])
    pages.wait_settled()
    assert backend.mapped == {PINNED_PAGE}
    pages.close()
    pages.check_integrity()


def test_the_thread_stops_asking_where_growth_is_refused_and_starts_again_when_pages_return():
    pages, backend = allocator(num_pages=300, most=4, preallocate=True)
    taken = [pages.take(), pages.take()]
    assert filled(pages) < 8
    asked = len(backend.calls)
    pages.wait_settled()
    assert len(backend.calls) == asked
    backend.most = 300
    pages.give(taken[:1])
    assert filled(pages) == 8
    pages.close()


def test_rule_51_a_freeze_drains_what_is_being_mapped_and_lets_nothing_begin():
    pages, backend = allocator(num_pages=300, preallocate=True)
    mapping, go_on = threading.Event(), threading.Event()
    page = pages.take()
    filled(pages)

    def hold() -> None:
        mapping.set()
        assert go_on.wait(20)

    backend.before_map = hold
    pages.take()  # the thread begins to refill
    assert mapping.wait(20)
    frozen = threading.Thread(target=pages.freeze)
    frozen.start()
    go_on.set()
    frozen.join(20)
    assert not frozen.is_alive()
    backend.before_map = lambda: pytest.fail("something was mapped while frozen")
    assert len(backend.mapped) == 3, "the reserve is unmapped, live pages and the pinned one stay"
    with pytest.raises(PageGrowthRefused, match="suspended"):
        pages.take()
    before = set(backend.mapped)
    pages.give([page])
    pages.wait_settled()
    assert backend.mapped == before, "nothing is recycled while frozen"
    assert pages.num_available == 0
    pages.check_integrity()
    backend.before_map = lambda: None
    pages.thaw()
    pages.take()
    pages.check_integrity()
    pages.close()


def test_a_taker_waits_for_the_page_that_is_being_mapped():
    """Rather than mapping another one beside it."""
    pages, backend = allocator(num_pages=300, preallocate=True)
    mapping, go_on = threading.Event(), threading.Event()
    pages.take()
    for _ in range(filled(pages) - 1):
        pages.take()
    filled(pages)
    calls = len(backend.calls)

    def hold() -> None:
        mapping.set()
        assert go_on.wait(20)

    backend.before_map = hold
    for _ in range(8):
        pages.take()
    assert mapping.wait(20)
    taker = threading.Thread(target=pages.take)
    taker.start()
    go_on.set()
    taker.join(20)
    assert not taker.is_alive()
    assert all(len(offsets) == 1 for _, offsets in backend.calls[calls:])
    pages.check_integrity()
    pages.close()


def test_what_is_fatal_in_the_thread_is_raised_where_pages_are_taken():
    pages, backend = allocator(num_pages=300, preallocate=True)

    class Fatal(Exception):
        pass

    def fail() -> None:
        if threading.current_thread().name == "kv-pages":
            raise Fatal("gone")

    backend.before_map = fail
    pages.take()
    with pytest.raises(Fatal):
        until_failed(pages)
    pages.close()


def until_failed(pages: PageAllocator) -> None:
    with pages._changed:
        while pages._failure is None:
            assert pages._changed.wait(20)
    with pytest.raises(type(pages._failure)):
        pages.check()  # an idle engine asks
    pages.take()


class PagesMachine(RuleBasedStateMachine):
    """Without the thread: what is mapped is exactly what is taken, reserved or held back."""

    @initialize(num_pages=st.integers(2, 40), most=st.integers(1, 40))
    def start(self, num_pages, most):
        self.pages, self.backend = allocator(num_pages, min(most, num_pages))
        self.taken: list[int] = []
        self.frozen = False

    @rule()
    def take(self):
        room = len(self.backend.mapped) < self.backend.most
        free = self.pages.stats().free
        if self.frozen or not ((room and free) or self.pages.stats().reserved):
            with pytest.raises(PageGrowthRefused):
                self.pages.take()
        else:
            self.taken.append(self.pages.take())

    @rule(data=st.data())
    def give(self, data):
        if self.taken:
            gone = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
            self.taken = [page for page in self.taken if page not in gone]
            self.pages.give(gone)

    @rule(most=st.integers(1, 40))
    def memory_changes(self, most):
        self.backend.most = min(most, self.backend.layout.num_pages)

    @rule()
    def suspend(self):
        if self.frozen:
            self.pages.thaw()
        else:
            self.pages.freeze()
        self.frozen = not self.frozen

    @invariant()
    def agrees(self):
        if not hasattr(self, "pages"):
            return
        self.pages.check_integrity()
        stats = self.pages.stats()
        assert stats.mapped == len(self.backend.mapped)
        assert {self.backend.layout.offset_of(page) for page in self.taken} <= self.backend.mapped
        if not self.taken and not self.frozen:
            assert self.backend.mapped == {PINNED_PAGE}


TestPages = PagesMachine.TestCase
TestPages.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
