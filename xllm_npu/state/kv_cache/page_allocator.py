"""Virtual pages of the KV cache: which are mapped, which wait in reserve, which may still be had.

A page is free (nothing is mapped), reserved (mapped, and nobody uses it), taken, or on its way between those. While
pages are taken, a thread keeps a few in reserve, so that growth seldom waits for the device; when the last one comes
back, all are unmapped. Map and unmap are the injected backend's: it is told byte offsets, page id times page size, and
refuses growth where memory or budget do not allow it. Knows no tensor, no device, no weights and no RPC.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from xllm_npu.state.kv_cache.page_layout import PageLayout

log = logging.getLogger(__name__)

PINNED_PAGE = 0  # holds the dummy block
LEAST_RESERVED, MOST_RESERVED = 8, 32  # pages; small caches keep fewer
RETRY_SECONDS = 2.0  # after growth was refused, the reserve is not filled for so long, unless pages come back


NOT_FOR_MEMORY = frozenset(("worker", "weights"))  # reasons that more memory would not have changed


class PageGrowthRefused(RuntimeError):
    """There is no page now. `reason` is one word: virtual, ledger, ceiling, memory, driver, frozen; worker, where one
    failed otherwise; weights, where those that were to wake could not be filled.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class KVCachePageBackend(Protocol):
    """Capacity and mapping, over all workers of an engine. Called from several threads."""

    def growable_pages(self) -> int:
        """How many more pages could be mapped now; an estimate that costs little."""
        ...

    def map(self, offsets: Sequence[int]) -> None:
        """Back these pages everywhere or nowhere. Raises PageGrowthRefused, and what is fatal."""
        ...

    def unmap(self, offsets: Sequence[int]) -> None:
        """Give the pages' memory back. No work uses them any more. What it raises is fatal."""
        ...


class PageStats(msgspec.Struct, array_like=True):
    """Gauges of this moment, in virtual pages, and refusals since start by reason."""

    mapped: int = 0
    reserved: int = 0  # of those: nobody uses them
    free: int = 0
    pinned: int = 0  # of those that are mapped: they stay for good
    refusals: dict[str, int] = msgspec.field(default_factory=dict)


class PageAllocator:
    def __init__(self, layout: PageLayout, backend: KVCachePageBackend, *, preallocate: bool = True) -> None:
        """The pinned page is mapped already. `preallocate` starts the thread; without it the reserve is what comes
        back.
        """
        assert layout.num_pages >= 2, "a cache needs the pinned page and another"
        self.layout = layout
        self._backend = backend
        share = max(1, layout.num_pages // 8)
        self._least, self._most = min(LEAST_RESERVED, share), min(MOST_RESERVED, 2 * share)
        self._free = list(range(1, layout.num_pages))  # a heap: low pages first
        self._reserved: list[int] = []
        self._taken: set[int] = {PINNED_PAGE}
        self._leaving: list[int] = []  # to be unmapped
        self._coming = self._going = 0  # pages that are being mapped, or unmapped, outside the lock
        self._held_back: list[int] = []  # given while frozen
        self._frozen = self._closing = self._refused = False
        self._refusals: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if preallocate:
            self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
            self._thread.start()

    # What there is

    @property
    def num_available(self) -> int:
        """Pages that `take` could give now: those in reserve and what growth allows. An estimate."""
        with self._changed:
            if self._frozen:
                return 0
            ready, free = len(self._reserved) + self._coming, len(self._free)
        return ready + min(free, max(0, self._backend.growable_pages()))

    @property
    def taken(self) -> set[int]:
        """Pages in use, the pinned one included."""
        with self._changed:
            return set(self._taken)

    def check(self) -> None:
        """Raise what has failed for good, in the thread too."""
        with self._changed:
            self._check()

    def stats(self) -> PageStats:
        with self._changed:
            mapped = len(self._taken) + len(self._reserved) + len(self._leaving) + len(self._held_back) + self._going
            return PageStats(mapped, len(self._reserved), len(self._free), 1, dict(self._refusals))

    # Taking and giving

    def take(self) -> int:
        """A mapped page that nobody uses: from the reserve, else mapped now. Raises PageGrowthRefused."""
        with self._changed:
            while not self._reserved and self._coming and not self._frozen and self._failure is None:
                self._changed.wait()  # for the page that the thread is mapping
            self._check()
            if self._frozen:
                raise self._refuse(PageGrowthRefused("frozen", "The KV cache is being suspended."))
            if self._reserved:
                page = self._reserved.pop()
                self._taken.add(page)
                self._changed.notify_all()
                return page
            if not self._free:
                raise self._refuse(PageGrowthRefused("virtual", "All pages of the KV cache are in use."))
            page = heapq.heappop(self._free)
            self._coming += 1
        refusal = self._map(page, self._taken.add)
        if refusal is not None:
            raise refusal
        return page

    def give(self, pages: Sequence[int]) -> None:
        """Nobody uses these any more, and no step in flight does."""
        with self._changed:
            self._check()
            for page in pages:
                assert page != PINNED_PAGE, "the pinned page stays"
                self._taken.remove(page)
            if self._frozen:
                self._held_back += pages
                return
            self._recycle(pages)
        if self._thread is None:
            self._unmap_leaving()

    def _recycle(self, pages: Sequence[int]) -> None:
        """Into the reserve while it has room and anything is in use; the rest is unmapped. The lock is held."""
        self._refused = False
        busy = len(self._taken) > 1
        room = self._most - len(self._reserved) if busy else 0
        self._reserved += pages[:room]
        self._leaving += pages[room:]
        if not busy:
            self._leaving += self._reserved
            self._reserved = []
        self._changed.notify_all()

    # Suspension

    def freeze(self) -> None:
        """No page is given out or recycled any more; returns when nothing is on its way, the reserve unmapped."""
        with self._changed:
            self._frozen = True
            self._leaving += self._reserved
            self._reserved = []
            self._changed.notify_all()
        if self._thread is None:
            self._unmap_leaving()
        self.wait_settled()

    def thaw(self) -> None:
        with self._changed:
            self._frozen = False
            held, self._held_back = self._held_back, []
            self._recycle(held)
        if self._thread is None:
            self._unmap_leaving()

    def wait_settled(self) -> None:
        """Until nothing is being mapped or unmapped nor waits to be. Raises what failed."""
        with self._changed:
            while (self._coming or self._going or self._leaving) and self._failure is None:
                self._changed.wait()
            self._check()

    def close(self) -> None:
        """End the thread. What is mapped stays so: the backend's owner frees it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # the engine hears of it when it next asks for a page
            log.debug("the thread that maps pages failed", exc_info=True)
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _turn(self) -> bool:
        """One piece of work, or a wait for some. False at the end."""
        with self._changed:
            if self._closing:
                return False
            wanted = self._wants_reserve()
            if not self._leaving and not wanted:
                if not self._changed.wait(RETRY_SECONDS):
                    self._refused = False
                return True
            if wanted:
                page = heapq.heappop(self._free)
                self._coming += 1
        if wanted:
            self._map(page, self._reserve)
        else:
            self._unmap_leaving()
        return True

    def _wants_reserve(self) -> bool:
        busy = len(self._taken) > 1 and not (self._frozen or self._refused or self._leaving)
        return busy and bool(self._free) and len(self._reserved) < self._least

    def _reserve(self, page: int) -> None:
        busy = len(self._taken) > 1 and not self._frozen
        (self._reserved if busy else self._leaving).append(page)

    # Moving

    def _map(self, page: int, arrive: Callable[[int], None]) -> PageGrowthRefused | None:
        """Map a page that was counted as coming. If growth is refused the page is free again."""
        refusal: PageGrowthRefused | None = None
        try:
            self._backend.map([self.layout.offset_of(page)])
        except PageGrowthRefused as error:
            refusal = error
        except BaseException as error:
            with self._changed:
                self._coming -= 1
                self._failure = error
                self._changed.notify_all()
            raise
        with self._changed:
            self._coming -= 1
            if refusal is None:
                arrive(page)
            else:
                heapq.heappush(self._free, page)
                self._refused = True
                self._refuse(refusal)
            self._changed.notify_all()
        return refusal

    def _unmap_leaving(self) -> None:
        with self._changed:
            pages, self._leaving = self._leaving, []
            self._going += len(pages)
        if not pages:
            return
        try:
            self._backend.unmap([self.layout.offset_of(page) for page in pages])
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise
        with self._changed:
            self._going -= len(pages)
            for page in pages:
                heapq.heappush(self._free, page)
            self._changed.notify_all()

    def _refuse(self, refusal: PageGrowthRefused) -> PageGrowthRefused:
        self._refusals[refusal.reason] = self._refusals.get(refusal.reason, 0) + 1
        return refusal

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def check_integrity(self) -> None:
        """Assert that every page is in one place."""
        with self._changed:
            places = [*self._free, *self._reserved, *self._taken, *self._leaving, *self._held_back]
            assert len(places) == len(set(places)), "a page is in two places"
            assert len(places) + self._coming + self._going == self.layout.num_pages, "pages are lost"
            assert PINNED_PAGE in self._taken
            assert self._frozen or not self._held_back
            assert len(self._reserved) <= self._most
