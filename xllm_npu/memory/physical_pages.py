"""Physical pages by stable ids: `num_pages` slots, each backed by a handle of the driver or not.

Elastic pools create a handle when a slot is taken and release it when the slot comes back; fixed ones create all at
once and keep them, unless who gives pages back wants their memory released. A slot is active once growth has reached
it; ids never change and pages never move. What is resident is reserved in the device's ledger, before it is and until
it is no more. Pages can be lent to other processes, and adopted from them: those are in the ledger once, for all that
have them. Knows handles and bytes; no addresses, no budget, no KV cache, no weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from xllm_platform.base import OutOfMemoryError, VirtualMemoryDriver

from xllm_npu.memory.device_ledger import DeviceLedger, LedgerShare
from xllm_npu.memory.ownership import undoing


class PhysicalPagePool:
    def __init__(self, driver: VirtualMemoryDriver, page_bytes: int, num_pages: int, *, elastic: bool,
                 ledger: DeviceLedger | None = None) -> None:
        """Raises OutOfMemoryError if a fixed pool does not fit; nothing is kept then."""
        assert page_bytes % driver.granularity == 0
        self.driver, self._ledger = driver, ledger
        self.page_bytes, self.num_pages, self.elastic = page_bytes, num_pages, elastic
        self._handles: dict[int, int] = {}  # id -> handle of those that are resident
        self._free = list(range(num_pages))  # a heap of ids that nobody has: low ones first
        self._taken: set[int] = set()
        self._adopted: set[int] = set()  # another process's
        self._lent: set[int] = set()
        self._share: LedgerShare | None = None  # of those that are lent
        if not elastic:
            self._create(self._free)

    def extend(self, count: int) -> None:
        """So many more slots, with ids above those there are. Raises OutOfMemoryError if the pool is fixed and they do
        not fit; nothing has changed then.
        """
        more = range(self.num_pages, self.num_pages + count)
        if not self.elastic:
            self._create(more)
        self._free += more  # still a heap: they are the largest
        self.num_pages += count

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def resident_bytes(self) -> int:
        """Of own pages."""
        return (len(self._handles) - len(self._adopted)) * self.page_bytes

    @property
    def fully_resident(self) -> bool:
        return len(self._handles) == self.num_pages

    def handle(self, page: int) -> int:
        return self._handles[page]

    def take(self, count: int) -> list[int]:
        """`count` pages, all or none. Raises OutOfMemoryError, what else the driver raises, MemoryOwnershipLost."""
        if count > len(self._free):
            raise OutOfMemoryError(f"{count} physical pages are wanted and {len(self._free)} of {self.num_pages} left.")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        try:
            self._create([page for page in pages if page not in self._handles])
        except BaseException:
            for page in pages:
                heapq.heappush(self._free, page)
            raise
        self._taken.update(pages)
        return pages

    def give(self, pages: Sequence[int], *, release: bool = False) -> None:
        """Pages that are mapped nowhere. `release`: their memory too, though the pool is fixed."""
        for page in pages:
            assert page in self._taken, f"page {page} was not taken"
            if self.elastic or release or page in self._adopted:
                self._release(page)
            self._taken.remove(page)
            heapq.heappush(self._free, page)

    def lend(self, pages: Sequence[int]) -> LedgerShare | None:
        """Other processes will have these pages too: the ledger's share that stands for them, which goes with them.

        Lending the same again is nothing new. They may be given back as always.
        """
        if not self._lent and pages:
            if self._ledger is not None:
                self._share = self._ledger.share(len(pages) * self.page_bytes)
            self._lent = set(pages)
        assert self._lent == set(pages), "other pages are lent already"
        return self._share

    def take_back(self) -> None:
        """Nobody else has the pages that were lent any more."""
        if self._share is not None and self._ledger is not None:
            self._ledger.take_back(self._share)
        self._lent, self._share = set(), None

    def adopt(self, handles: Sequence[int]) -> list[int]:
        """Pages that were imported, as ids that are taken. Their memory is not this pool's to count."""
        empty = sorted(page for page in self._free if page not in self._handles)[: len(handles)]
        more = range(self.num_pages, self.num_pages + len(handles) - len(empty))
        self.num_pages += len(more)
        pages = [*empty, *more]
        used = set(empty)
        self._free = [page for page in self._free if page not in used]
        heapq.heapify(self._free)
        self._handles.update(zip(pages, handles, strict=True))
        self._taken.update(pages)
        self._adopted.update(pages)
        return pages

    def close(self) -> None:
        """Release what is resident; everything has come back."""
        assert not self._taken, f"{len(self._taken)} pages are in use"
        for page in sorted(self._handles):
            self._release(page)

    def _create(self, pages: Sequence[int]) -> None:
        if self._ledger is not None:
            self._ledger.reserve(len(pages) * self.page_bytes)
        done: list[int] = []
        try:
            for page in pages:
                self._handles[page] = self.driver.create_page(self.page_bytes)
                done.append(page)
        except BaseException:
            with undoing("A page's creation"):
                for page in done:
                    self._release(page)
                if self._ledger is not None:
                    self._ledger.release((len(pages) - len(done)) * self.page_bytes)
            raise

    def _release(self, page: int) -> None:
        self.driver.release_page(self._handles[page])
        del self._handles[page]
        if page in self._adopted:
            self._adopted.remove(page)
        elif page in self._lent:
            self._lent.remove(page)
            if not self._lent and self._share is not None:  # those who have them count for them
                self._share.close()
                self._share = None
        elif self._ledger is not None:
            self._ledger.release(self.page_bytes)

    def check_integrity(self) -> None:
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not self._taken & set(self._free), "a page is free and taken"
        assert len(self._taken) + len(self._free) == self.num_pages, "pages are lost"
        assert self._handles.keys() >= self._taken, "pages that are taken are not resident"
        assert not self.elastic or self._handles.keys() == self._taken, "pages are resident that nobody has taken"
        assert self._handles.keys() <= set(range(self.num_pages))
        assert len(set(self._handles.values())) == len(self._handles), "two pages share a handle"
        assert self._adopted <= self._taken
        assert self._lent <= self._handles.keys() - self._adopted
        if self._ledger is not None:
            lent = len(self._lent) * self.page_bytes
            assert self._ledger.reserved + lent == self.resident_bytes, "the device's ledger and the pool differ"
