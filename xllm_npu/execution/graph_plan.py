"""What captured graphs cost, found out before the KV cache is sized, and how many of them the device can hold.

Graphs refer to the cache's memory, so they can only be captured after it has been allocated. `measure` therefore
captures the two largest of each kind over a cache of two blocks first, looks at what they took, and gives it all back.
The largest pays for the memory that all share, the second shows what each further one adds. What is counted as one
graph of prompts is a row of them, one more than the model has layers.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from xllm_platform.base import Platform

from xllm_npu.execution.model_loader import LoadError

log = logging.getLogger(__name__)

# Streams that the rest of the process may come to need (communicators, the allocator, libraries). A device has about
# 2,000, and users of ACL graphs who leave fewer than some 250 free run into error 207008.
STREAMS_KEPT = 248


@dataclass(slots=True, frozen=True)
class GraphSizes:
    """What is captured, ascending."""

    decode: list[int] = field(default_factory=list)  # rows
    prefill: list[int] = field(default_factory=list)  # tokens


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


@dataclass(slots=True, frozen=True)
class GraphCosts:
    """Of both kinds; `streams_left` of each is that before anything was captured."""

    decode: GraphCost = field(default_factory=GraphCost)
    prefill: GraphCost = field(default_factory=GraphCost)

    def counts(self, wanted: GraphSizes) -> tuple[int, int]:
        """How many of each kind the device's streams allow. Graphs of decodes come first: they gain more."""
        decode = self.decode.most_graphs(len(wanted.decode))
        return decode, self._prefill_after(decode).most_graphs(len(wanted.prefill))

    def choose(self, wanted: GraphSizes, counts: tuple[int, int]) -> tuple[GraphSizes, int]:
        """So many of the sizes, and the bytes that they take; what is left out is logged. Raises LoadError."""
        decode, prefill = counts
        kept = GraphSizes(
            fitting(wanted.decode, decode, self.decode),
            fitting(wanted.prefill, prefill, self._prefill_after(decode), PREFILL) if wanted.prefill else [])
        return kept, self.decode.bytes(len(kept.decode)) + self.prefill.bytes(len(kept.prefill))

    def _prefill_after(self, decode: int) -> GraphCost:
        left = self.prefill.streams_left
        if left is None:
            return self.prefill
        return dataclasses.replace(self.prefill, streams_left=left - decode * self.decode.further_streams)


def measure(
    platform: Platform, capture: Callable[[GraphSizes], None], release: Callable[[], None], wanted: GraphSizes
) -> GraphCosts:
    """Capture the largest two of each kind, one after the other in the order in which all will be.

    `capture` adds to what it has captured before, in the same memory; `release` drops all of that.
    """
    trial = Trial(platform)
    prefill = [trial.take(capture, GraphSizes(prefill=[size])) for size in wanted.prefill[:-3:-1]]
    decode = [trial.take(capture, GraphSizes(decode=[size])) for size in wanted.decode[:-3:-1]]
    release()
    gc.collect()
    platform.empty_cache()
    return GraphCosts(trial.cost(decode), trial.cost(prefill))


class Trial:
    """What the device has less after each capture."""

    def __init__(self, platform: Platform) -> None:
        self._platform, self._backend = platform, platform.graph_backend()
        gc.collect()
        platform.empty_cache()  # as captures do; what loading left there would count as gained
        self._free, self._streams = self._look()
        self._streams_before = self._streams

    def take(self, capture: Callable[[GraphSizes], None], sizes: GraphSizes) -> tuple[int, int]:
        """Bytes and streams."""
        capture(sizes)
        (before, streams_before), (after, streams) = (self._free, self._streams), self._look()
        self._free, self._streams = after, streams
        used = streams_before - streams if streams is not None and streams_before is not None else 0
        return max(0, before - after), used

    def cost(self, taken: list[tuple[int, int]]) -> GraphCost:
        if not taken:
            return GraphCost(streams_left=self._streams_before)
        return GraphCost(taken[0][0], *taken[-1], self._streams_before)

    def _look(self) -> tuple[int, int | None]:
        self._platform.synchronize()
        return self._platform.memory_info().free, self._backend.streams_left()


@dataclass(slots=True, frozen=True)
class Kind:
    """How the log and messages speak of graphs."""

    graphs: str
    sizes: str
    remedy: str


DECODE = Kind("graphs", "batch sizes", "turn enable_graph off, or end what else uses the device")
PREFILL = Kind("rows of graphs for prompts", "numbers of tokens",
               "turn enable_prefill_piecewise_graph off, or capture fewer graph_batch_sizes")


def fitting(sizes: list[int], count: int, cost: GraphCost, kind: Kind = DECODE) -> list[int]:
    """`count` of `sizes`, the largest and the smallest among them; says so if that is not all of them."""
    if count >= len(sizes):
        return sizes
    if count < 1:
        raise LoadError(
            f"The device has {cost.streams_left} streams left for {kind.graphs}, of which {STREAMS_KEPT} are kept "
            f"free, and one takes {cost.further_streams}: {kind.remedy}.")
    last = len(sizes) - 1
    kept = sorted({sizes[last - round(i * last / max(1, count - 1))] for i in range(count)})
    log.warning("the device's streams (%s left, %d each) allow %d of %d %s: %s %s are captured", cost.streams_left,
                cost.further_streams, count, len(sizes), kind.graphs, kind.sizes, ", ".join(map(str, kept)))
    return kept
