"""What captured graphs cost, found out before the KV cache is sized, and how many of them the device can hold.

Graphs refer to the cache's memory, so they can only be captured after it has been allocated. `measure` therefore
captures the two largest over a cache of two blocks first, looks at what they took, and gives it all back. The largest
pays for the memory that all share, the second shows what each further one adds.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from xllm_platform.base import Platform

from xllm_npu.execution.graph_runner import GraphRunner
from xllm_npu.execution.model_loader import LoadError

log = logging.getLogger(__name__)

# Streams that the rest of the process may come to need (communicators, the allocator, libraries). A device has about
# 2,000, and users of ACL graphs who leave fewer than some 250 free run into error 207008.
STREAMS_KEPT = 248


@dataclass(slots=True, frozen=True)
class GraphCost:
    """`first` of the largest graph, `further` of each other one."""

    first_bytes: int = 0
    further_bytes: int = 0
    further_streams: int = 0
    streams_left: int | None = None  # before any was captured; None: there is no limit

    def bytes(self, count: int) -> int:
        """What `count` graphs take."""
        return self.first_bytes + (count - 1) * self.further_bytes if count else 0

    def most_graphs(self, wanted: int) -> int:
        """How many of `wanted` graphs the device's streams allow."""
        if self.streams_left is None:
            return wanted
        return max(0, min(wanted, (self.streams_left - STREAMS_KEPT) // max(1, self.further_streams)))


def measure(
    platform: Platform, capture: Callable[[list[int]], GraphRunner], release: Callable[[], None], sizes: list[int]
) -> GraphCost:
    """Capture the largest two of `sizes`; `capture` makes a runner that holds them, `release` drops what it leaves."""
    free, streams = [], []

    def look() -> None:
        platform.synchronize()
        free.append(platform.memory_info().free)
        streams.append(backend.streams_left())

    backend = platform.graph_backend()
    look()
    runners = []
    for size in sorted(sizes, reverse=True)[:2]:
        runners.append(capture([size]))
        look()
    del runners
    release()
    gc.collect()
    platform.empty_cache()
    taken = [max(0, before - after) for before, after in pairwise(free)]
    used = [before - after for before, after in pairwise(streams) if before is not None and after is not None]
    return GraphCost(taken[0], taken[-1], used[-1] if used else 0, streams[0])


def fitting(sizes: list[int], count: int, cost: GraphCost) -> list[int]:
    """`count` of `sizes`, the largest and the smallest among them; says so if that is not all of them."""
    if count >= len(sizes):
        return sizes
    if count < 1:
        raise LoadError(
            f"The device has {cost.streams_left} streams left, of which {STREAMS_KEPT} are kept free, and a graph "
            f"takes {cost.further_streams}: turn enable_graph off, or end what else uses the device.")
    last = len(sizes) - 1
    kept = sorted({sizes[last - round(i * last / max(1, count - 1))] for i in range(count)})
    log.warning("the device's streams (%s left, %d a graph) allow %d of %d graphs: batch sizes %s are captured",
                cost.streams_left, cost.further_streams, count, len(sizes), ", ".join(map(str, kept)))
    return kept
