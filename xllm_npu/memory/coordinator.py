"""Pages over all workers of an engine: one ledger, and transactions that all of them take part in.

The first worker's memory is in this process, the others' behind an RPC; a virtual page is backed on all of them or on
none. When a worker refuses, every one of them undoes the transaction before the ledger gets its reservation back. Where
one does not acknowledge that, nobody knows any more whose pages are whose, and the engine must end.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.page_budget import LedgerFull, WorkerPhysicalPageBudget
from xllm_npu.memory.worker_memory import MemoryCall, WorkerMemory
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.kv_cache.page_layout import PageLayout

KV = "kv"
CAPACITY_SECONDS = 0.5  # an answer about free memory serves for so long; mapping always asks anew


class DistributedVirtualMemoryCoordinator:
    """The `KVCachePageBackend` of an engine."""

    def __init__(
        self, workers: Sequence[WorkerMemory], layout: PageLayout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Every worker has its pinned page already. Raises what asking them raises."""
        assert workers
        self._workers, self.layout = list(workers), layout
        self._lock = threading.Lock()  # one call at a time
        self._transactions = itertools.count()
        self._clock = clock
        self._growable, self._asked = self._ask(), clock()
        slots = layout.num_pages * layout.num_regions
        self.budget = WorkerPhysicalPageBudget(slots, (self._growable + 1) * layout.num_regions)
        self.budget.reserve({KV: layout.num_regions})

    def growable_pages(self) -> int:
        """The least that any worker would still back. An estimate; where a worker does not answer, 0.

        Never waits for pages that are being mapped: schedulers ask before every step.
        """
        if self._clock() - self._asked > CAPACITY_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._growable, self._asked = self._ask(), self._clock()
            finally:
                self._lock.release()
        return self._growable

    def map(self, offsets: Sequence[int]) -> None:
        """Back pages on all workers. Raises PageGrowthRefused, or MemoryOwnershipLost."""
        count = len(offsets) * self.layout.num_regions
        with self._lock:
            self._reserve(count)
            try:
                self._transact(offsets)
            except PageGrowthRefused:
                self.budget.release(KV, count)
                self._growable = 0
                raise
            self._growable = max(0, self._growable - len(offsets))

    def unmap(self, offsets: Sequence[int]) -> None:
        """Give pages back on all workers. Raises MemoryOwnershipLost."""
        if not offsets:
            return
        with self._lock:
            failed = self._failures(MemoryCall(verb="unmap", offsets=list(offsets)))
            if failed:
                raise MemoryOwnershipLost(f"Memory could not be given back: {failed[0]}") from failed[0]
            self.budget.release(KV, len(offsets) * self.layout.num_regions)
            self._asked = -CAPACITY_SECONDS

    def _reserve(self, count: int) -> None:
        """Slots that memory allows beyond those active become so; workers have the last word about memory."""
        try:
            self.budget.reserve({KV: count})
        except LedgerFull:
            self.budget.activate(self.budget.total_reserved + self._ask() * self.layout.num_regions)
            try:
                self.budget.reserve({KV: count})
            except LedgerFull as error:
                raise PageGrowthRefused("ledger", str(error)) from error

    def _transact(self, offsets: Sequence[int]) -> None:
        transaction = next(self._transactions)
        for call in (MemoryCall(verb="prepare", transaction=transaction, offsets=list(offsets)),
                     MemoryCall(verb="commit", transaction=transaction)):
            failed = self._failures(call)
            if failed:
                self._undo(transaction, failed)

    def _undo(self, transaction: int, causes: list[Exception]) -> None:
        """Every worker is told, also those that failed; then raise why growth did not come about."""
        cause = next((error for error in causes if isinstance(error, MemoryOwnershipLost)), causes[0])
        failed = self._failures(MemoryCall(verb="abort", transaction=transaction))
        if isinstance(cause, MemoryOwnershipLost):
            raise cause
        if failed:
            raise MemoryOwnershipLost(
                f"Memory could not be given back after a failed growth ({cause}): {failed[0]}") from failed[0]
        if isinstance(cause, PageGrowthRefused):
            raise cause
        raise PageGrowthRefused("worker", f"A worker could not map pages: {cause}") from cause

    def _ask(self) -> int:
        answers: list[int] = []
        failed = self._failures(MemoryCall(verb="growable"), answers)
        return 0 if failed else min(answers)

    def _failures(self, call: MemoryCall, answers: list[int] | None = None) -> list[Exception]:
        """Have all workers do it, and wait for all of them; what those raised that failed."""
        failed: list[Exception] = []
        started: list[WorkerMemory] = []
        for worker in self._workers:
            try:
                worker.start(call)
                started.append(worker)
            except Exception as error:
                failed.append(error)
        for worker in started:  # the first does its part here, while others are at it in their processes
            try:
                answer = worker.finish()
            except Exception as error:
                failed.append(error)
            else:
                if answers is not None:
                    answers.append(answer)
        return failed
