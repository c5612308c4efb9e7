"""Sequences that wait for a row: a heap by order, with lazy removal and a guard against starvation.

The guard: a sequence that has waited longer than `starve_seconds` while others overtook it becomes the next one,
whatever its rank (offline work keeps its place behind online work).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from xllm_npu.state.kv_cache.prefix_cache import PrefixCache
from xllm_npu.state.request import Sequence, SequenceState


class WaitingQueue:
    def __init__(self, starve_seconds: float | None, prefix: PrefixCache, rotary_switch: int = 0) -> None:
        self._heap: list[Sequence] = []
        self._oldest: deque[Sequence] = deque()  # by the time they were pushed; removed ones skipped lazily
        self._members: set[Sequence] = set()
        self._starve_seconds = starve_seconds
        self._prefix = prefix
        self._switch = rotary_switch

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def push(self, sequence: Sequence) -> None:
        """The sequence waits from now on; its full blocks are hashed, so that admission can look them up."""
        assert sequence not in self._members
        sequence.state = SequenceState.WAITING
        if self._prefix.enabled:
            count = len(sequence.tokens)
            root = self._prefix.root(sequence.request.message.cache_salt, second=0 < self._switch < count)
            if root != sequence.root:
                sequence.root, sequence.chain = root, []
            self._prefix.extend_chain(sequence.chain, root, sequence.tokens, count)
        self._members.add(sequence)
        heapq.heappush(self._heap, sequence)
        self._oldest.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._members.remove(sequence)
        if len(self._oldest) > 2 * len(self._members) + 64:  # bounded: drop what was removed long ago
            self._oldest = deque(s for s in dict.fromkeys(self._oldest) if s in self._members)
            self._heap = [s for s in dict.fromkeys(self._heap) if s in self._members]
            heapq.heapify(self._heap)

    def peek(self, now: float) -> Sequence | None:
        """The next to admit; `now` is monotonic seconds."""
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        first = self._heap[0]
        if self._starve_seconds is None:
            return first
        while self._oldest and self._oldest[0] not in self._members:
            self._oldest.popleft()
        oldest = self._oldest[0]
        starving = now - oldest.request.enqueue_time > self._starve_seconds
        return oldest if starving and oldest.order[0] == first.order[0] and _overtaken(oldest, first) else first


def _overtaken(oldest: Sequence, first: Sequence) -> bool:
    return first.request.arrival > oldest.request.arrival
