"""Sequences that wait for a row: a heap by order, with lazy removal and a guard against starvation.

The guard: a sequence that has waited longer than `starve_seconds` while others overtook it becomes the next one,
whatever its rank (offline work keeps its place behind online work).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator

from xllm_npu.state.kv_cache.prefix_cache import PrefixCache
from xllm_npu.state.request import Sequence, SequenceState


class WaitingQueue:
    def __init__(self, starve_seconds: float | None, prefix: PrefixCache, rotary_switch: int = 0) -> None:
        self._heap: list[Sequence] = []
        self._oldest: deque[Sequence] = deque()  # by the time they were pushed; removed ones skipped lazily
        self._members: set[Sequence] = set()
        self.adapters: Counter[int] = Counter()  # of those that wait and have one
        self._starve_seconds = starve_seconds
        self._prefix = prefix
        self._switch = rotary_switch
        self._parked: dict[Sequence, None] = {}
        self._claim: Sequence | None = None
        self._claim_left = False  # the first of those that are parked is gone

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
            message = sequence.request.message
            root = self._prefix.root(message.cache_salt, 0 < self._switch < count, message.lora_id)
            if root != sequence.root:
                sequence.root, sequence.chain = root, []
            self._prefix.extend_chain(sequence.chain, root, sequence.tokens, count)
        self._members.add(sequence)
        if sequence.request.message.lora_id:
            self.adapters[sequence.request.message.lora_id] += 1
        heapq.heappush(self._heap, sequence)
        self._oldest.append(sequence)

    # Those that wait for an adapter slot

    @property
    def claim(self) -> Sequence | None:
        """The first in order of those that are parked."""
        return None if self._claim_left else self._claim

    def park(self, sequence: Sequence) -> None:
        """It waits on, and `peek` passes it over until `unpark`."""
        self._parked[sequence] = None
        if self._claim is None or sequence < self._claim:
            self._claim = sequence

    def unpark(self, changed: bool) -> None:
        """`peek` looks at all again, if there is a reason: slots have `changed`, or the first of those parked left."""
        if not self._parked or not (changed or self._claim_left):
            return
        for sequence in self._parked:
            heapq.heappush(self._heap, sequence)
        self._oldest.extendleft(sorted(self._parked, key=lambda s: s.request.enqueue_time, reverse=True))
        self._parked.clear()
        self._claim, self._claim_left = None, False

    def check_integrity(self) -> None:
        assert set(self._parked) <= self._members, "a sequence is parked and does not wait"
        adapters = Counter(s.request.message.lora_id for s in self._members)
        del adapters[0]
        assert self.adapters == adapters, "the adapters of those that wait are miscounted"
        assert not self._parked or self._claim_left or self._claim == min(self._parked)

    def remove(self, sequence: Sequence) -> None:
        self._members.remove(sequence)
        adapter = sequence.request.message.lora_id
        if adapter:
            self.adapters[adapter] -= 1
            if not self.adapters[adapter]:
                del self.adapters[adapter]
        if sequence in self._parked:
            del self._parked[sequence]
            self._claim_left |= sequence is self._claim
        if len(self._oldest) > 2 * len(self._members) + 64:  # bounded: drop what was removed long ago
            self._oldest = deque(s for s in dict.fromkeys(self._oldest) if s in self._members)
            self._heap = [s for s in dict.fromkeys(self._heap) if s in self._members]
            heapq.heapify(self._heap)

    def peek(self, now: float) -> Sequence | None:
        """The next to admit; `now` is monotonic seconds."""
        while self._heap and (self._heap[0] not in self._members or self._heap[0] in self._parked):
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        first = self._heap[0]
        if self._starve_seconds is None:
            return first
        while self._oldest[0] not in self._members or self._oldest[0] in self._parked:  # `first` is in it too
            self._oldest.popleft()
        oldest = self._oldest[0]
        starving = now - oldest.request.enqueue_time > self._starve_seconds
        return oldest if starving and oldest.order[0] == first.order[0] and _overtaken(oldest, first) else first


def _overtaken(oldest: Sequence, first: Sequence) -> bool:
    return first.request.arrival > oldest.request.arrival
