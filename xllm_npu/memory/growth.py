"""How far pages may grow now: ceilings, live free memory, and room for what execution may need again.

`GrowthLimits` is what was set. `ExecutionHeadroom` remembers what execution has needed: with a caching allocator's
statistics, the highest reservation so far less the present one (what it still holds is missing from free memory
already; what it gave back it may take again). Without them, the least that was ever free beside the pages. Neither
foresees shapes that have not run yet, nor memory that libraries take directly: `reserve_bytes` is for those.
Ceilings are for all pages on the device, which its ledger knows, whichever model or rank they serve.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from xllm_platform.base import AllocatorStats, MemoryInfo

from xllm_npu.memory.device_ledger import DeviceLedger
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthLimits:
    """Bytes of one device, or of this rank's part where ranks share one."""

    total_bytes: int
    ratio: float = 0.0  # of total_bytes that everything together may fill; 0: no such ceiling
    max_bytes: int = 0  # of pages; 0: no such ceiling
    reserve_bytes: int = 0

    @property
    def reservation_bytes(self) -> int:
        """Addresses to reserve: what pages could ever take."""
        most = int(self.total_bytes * self.ratio) if self.ratio else self.total_bytes
        return min(most, self.max_bytes) if self.max_bytes else most

    @property
    def kept_free_bytes(self) -> int:
        """What the ratio leaves to others, and the explicit reserve."""
        return (int(self.total_bytes * (1 - self.ratio)) if self.ratio else 0) + self.reserve_bytes


class ExecutionHeadroom:
    """Observes one worker's allocator. All peaks are kept here, whoever resets the allocator's own."""

    def __init__(self) -> None:
        self._peak = 0
        self._least_free: int | None = None  # least of free + committed bytes, where there is no allocator to ask

    def observe(self, stats: AllocatorStats, free: int, committed: int) -> int:
        """Bytes of `free` that pages must leave, by what has been seen up to now."""
        if stats.reserved or stats.peak_reserved:
            self._peak = max(self._peak, stats.peak_reserved, stats.reserved)
            return self._peak - stats.reserved
        both = free + committed
        self._least_free = both if self._least_free is None else min(self._least_free, both)
        return both - self._least_free


class GrowthRule:
    """Asked before every growth. `sharers` ranks of this machine grow alike out of one memory."""

    def __init__(
        self, limits: GrowthLimits, memory_info: Callable[[], MemoryInfo], stats: Callable[[], AllocatorStats],
        sharers: int = 1, ledger: DeviceLedger | None = None,
    ) -> None:
        """Without a ledger nobody else has pages there."""
        self.limits, self.ledger = limits, ledger
        if ledger is not None:
            ledger.limit = limits.reservation_bytes * sharers
        self._memory_info, self._stats, self._sharers = memory_info, stats, sharers
        self._headroom = ExecutionHeadroom()
        self._lock = threading.Lock()

    def growable_bytes(self, committed: int) -> int:
        """How much more pages may take; below 0 if they have too much already. `committed`: what they take now."""
        left = self.limits.reservation_bytes - committed
        if self.ledger is not None:
            left = min(left, self.ledger.left // self._sharers)
        return min(left, self._live(committed))

    def _live(self, committed: int) -> int:
        with self._lock:
            together = committed * self._sharers if self.ledger is None else self.ledger.total
            free = self._memory_info().free
            headroom = self._headroom.observe(self._stats(), free, together)
        return (free - headroom) // self._sharers - self.limits.kept_free_bytes

    def check(self, more: int, committed: int) -> None:
        """Raises PageGrowthRefused unless `more` bytes may be taken. With 0: that what was taken leaves enough."""
        if more > self.limits.reservation_bytes - committed:
            raise PageGrowthRefused("ceiling", f"Pages take {committed} bytes, and {more} more would pass the "
                                               f"ceiling of {self.limits.reservation_bytes}.")
        if more and self.ledger is not None and more > (left := self.ledger.left):
            raise PageGrowthRefused("ceiling", f"{more} more bytes of pages would pass the ceiling of all models on "
                                               f"the device, which leaves {max(0, left)}.")
        live = self._live(committed)
        if more > live:
            raise PageGrowthRefused("memory", f"{more} more bytes of pages would leave too little memory: "
                                              f"{max(0, live)} bytes may be taken now.")
