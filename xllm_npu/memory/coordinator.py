"""Pages over all workers of an engine: one ledger, and transactions that all of them take part in.

The first worker's memory is in this process, the others' behind an RPC; a virtual page is backed on all of them or on
none, and they sleep and wake together. When a worker refuses, every one of them undoes the transaction before the
ledger gets its reservation back. Where one does not acknowledge that, nobody knows any more whose pages are whose, and
the engine must end.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import xxhash

from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.page_budget import LedgerFull, WorkerPhysicalPageBudget
from xllm_npu.memory.worker_memory import MemoryCall, WorkerMemory
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.kv_cache.page_layout import PageLayout
from xllm_npu.state.messages import KV_CACHE_TAG, TAGS, WEIGHTS_TAG

CAPACITY_SECONDS = 0.5  # an answer about free memory serves for so long; mapping always asks anew


class SleepFailed(RuntimeError):
    """A worker could not make itself ready to sleep; all are awake as before. The message says why."""


class DistributedVirtualMemoryCoordinator:
    """The `KVCachePageBackend` of an engine, where its KV cache is elastic; and how its workers sleep."""

    def __init__(
        self, workers: Sequence[WorkerMemory], layout: PageLayout | None,
        clock: Callable[[], float] = time.monotonic, *, elastic: bool = True, has_weights: bool = False,
    ) -> None:
        """Every worker has mapped what it has at rest. `layout`: of the KV cache, if that is in virtual memory.

        Raises what asking the workers raises.
        """
        assert workers
        self._workers, self._layout = list(workers), layout
        self.elastic_kv, self.has_weights = elastic and layout is not None, has_weights
        self._lock = threading.Lock()
        self._lost: MemoryOwnershipLost | None = None
        self._transactions = itertools.count()
        self._clock = clock
        self._growable, self._asked = self._ask(), clock()
        self._at_rest = {WEIGHTS_TAG: self._weight_pages(), KV_CACHE_TAG: 0}  # slots
        regions = growing = slots = 0
        if layout is not None:
            regions, slots = layout.num_regions, layout.num_pages * layout.num_regions
            growing = self._growable * regions if elastic else 0
            self._at_rest[KV_CACHE_TAG] = regions if elastic else slots
        resting = sum(self._at_rest.values())
        self.budget = WorkerPhysicalPageBudget(slots + self._at_rest[WEIGHTS_TAG], resting + growing)
        self.budget.reserve(self._at_rest)
        self.awake = set(TAGS)  # what has memory; these own the ledger's slots

    @property
    def layout(self) -> PageLayout:
        assert self._layout is not None
        return self._layout

    # The KV cache's pages

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
        with self._alone():
            self._reserve({KV_CACHE_TAG: count})
            transaction = next(self._transactions)
            try:
                self._transact(transaction, [MemoryCall(verb="prepare", offsets=list(offsets)),
                                             MemoryCall(verb="commit")])
            except PageGrowthRefused:
                self.budget.release(KV_CACHE_TAG, count)
                self._growable = 0
                raise
            self._growable = max(0, self._growable - len(offsets))

    def unmap(self, offsets: Sequence[int]) -> None:
        """Give pages back on all workers. Raises MemoryOwnershipLost."""
        if not offsets:
            return
        with self._alone():
            self._insist(MemoryCall(verb="unmap", offsets=list(offsets)), "Memory could not be given back")
            self.budget.release(KV_CACHE_TAG, len(offsets) * self.layout.num_regions)
            self._asked = -CAPACITY_SECONDS

    # Sleep and wake-up

    @property
    def is_awake(self) -> bool:
        return len(self.awake) == len(TAGS)

    def sleep(self, level: int) -> int:
        """Give back weights and KV cache on all workers; bytes in all. Only what is at rest of the KV cache is mapped.

        Level 1 keeps the weights' contents, level 2 does not (see weight_contents). Raises SleepFailed where a worker
        cannot keep them, and all are as before; or MemoryOwnershipLost.
        """
        assert self.has_weights
        with self._alone():
            transaction = next(self._transactions)
            failed = self._failures(MemoryCall(verb="prepare_sleep", transaction=transaction, level=level))
            if failed:
                cause = self._compensate(transaction, failed)
                raise SleepFailed(f"Going to sleep failed: {cause}") from cause
            freed: list[int] = []
            self._insist(MemoryCall(verb="commit_sleep", transaction=transaction), "A worker could not sleep", freed)
            for tag in self.awake:
                self.budget.release(tag, self._at_rest[tag])
            self.awake = set()
            self._asked = -CAPACITY_SECONDS
            return sum(freed)

    def wake(self, tags: Collection[str] = TAGS) -> None:
        """Take back what sleeps of `tags`, on all workers and in one transaction.

        Raises PageGrowthRefused, and all is as before; or MemoryOwnershipLost.
        """
        with self._alone():
            wanted = [tag for tag in TAGS if tag in tags and tag not in self.awake]
            slots = {tag: self._at_rest[tag] for tag in wanted}
            if not wanted:
                return
            self._reserve(slots)
            transaction = next(self._transactions)
            try:
                self._transact(transaction, [MemoryCall(verb="prepare_wake", tags=wanted),
                                             MemoryCall(verb="commit_wake")])
            except PageGrowthRefused:
                for tag, count in slots.items():
                    self.budget.release(tag, count)
                raise
            self._insist(MemoryCall(verb="finish_wake", transaction=transaction), "A worker did not end its wake-up")
            self.awake |= set(wanted)
            self._asked = -CAPACITY_SECONDS

    def weights_hash(self) -> str:
        """Of all workers' weights, in their order. Raises what a worker raises."""
        with self._alone():
            answers: list[int] = []
            failed = self._failures(MemoryCall(verb="weights_hash"), answers)
        if failed:
            raise failed[0]
        return xxhash.xxh3_128_hexdigest(b"".join(answer.to_bytes(8, "little") for answer in answers))

    # Transactions

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time, and none after ownership was lost: that is raised again."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                yield
            except MemoryOwnershipLost as error:
                self._lost = error
                raise

    def _reserve(self, wanted: dict[str, int]) -> None:
        """Slots that memory allows beyond those active become so; workers have the last word about memory."""
        try:
            self.budget.reserve(wanted)
        except LedgerFull:
            regions = 1 if self._layout is None else self._layout.num_regions
            self.budget.activate(self.budget.total_reserved + self._ask() * regions)
            try:
                self.budget.reserve(wanted)
            except LedgerFull as error:
                raise PageGrowthRefused("ledger", str(error)) from error

    def _transact(self, transaction: int, calls: Sequence[MemoryCall]) -> None:
        """One call after the other on all workers. When one fails, raises after all have undone the transaction."""
        for call in calls:
            call.transaction = transaction
            failed = self._failures(call)
            if failed:
                cause = self._compensate(transaction, failed)
                if isinstance(cause, PageGrowthRefused):
                    raise cause
                raise PageGrowthRefused("worker", f"A worker could not map pages: {cause}") from cause

    def _compensate(self, transaction: int, causes: list[Exception]) -> Exception:
        """Every worker is told to undo, also those that failed; why it came to that. Raises MemoryOwnershipLost."""
        cause = next((error for error in causes if isinstance(error, MemoryOwnershipLost)), causes[0])
        failed = self._failures(MemoryCall(verb="abort", transaction=transaction))
        if isinstance(cause, MemoryOwnershipLost):
            raise cause
        if failed:
            raise MemoryOwnershipLost(
                f"Memory could not be given back after a failed growth ({cause}): {failed[0]}") from failed[0]
        return cause

    def _insist(self, call: MemoryCall, otherwise: str, answers: list[int] | None = None) -> None:
        """There is no way back from it. Raises MemoryOwnershipLost."""
        failed = self._failures(call, answers)
        if failed:
            raise MemoryOwnershipLost(f"{otherwise}: {failed[0]}") from failed[0]

    def _ask(self) -> int:
        answers: list[int] = []
        failed = self._failures(MemoryCall(verb="growable"), answers)
        return 0 if failed else min(answers)

    def _weight_pages(self) -> int:
        """Of the worker with the most."""
        if not self.has_weights:
            return 0
        answers: list[int] = []
        failed = self._failures(MemoryCall(verb="weight_pages"), answers)
        if failed:
            raise failed[0]
        return max(answers)

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
