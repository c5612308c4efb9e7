"""Responses that are kept for `previous_response_id` and GET, in memory, bounded in number and bytes.

What was used least recently goes first. Nothing outlives the process; whoever may use the API may read a response whose
id they know.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 256 * 2**20  # of all entries, as JSON


@dataclass(slots=True, frozen=True)
class StoredResponse:
    body: bytes  # the response, as it was answered
    messages: list[dict[str, Any]]  # the conversation up to and with it, in chat's form, without instructions
    input: list[Any]  # the items of its own request
    num_bytes: int  # what it counts for


class ResponseStore:
    """`capacity` 0: nothing is kept."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self._capacity, self._max_bytes = capacity, max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def enabled(self) -> bool:
        return self._capacity > 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, id: str) -> StoredResponse | None:
        entry = self._entries.get(id)
        if entry is not None:
            self._entries.move_to_end(id)
        return entry

    def put(self, id: str, entry: StoredResponse) -> None:
        self.remove(id)
        self._entries[id] = entry
        self._bytes += entry.num_bytes
        while len(self._entries) > self._capacity or self._bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def remove(self, id: str) -> bool:
        entry = self._entries.pop(id, None)
        if entry is not None:
            self._bytes -= entry.num_bytes
        return entry is not None

    def check_integrity(self) -> None:
        assert self._bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert len(self._entries) <= self._capacity
        assert self._bytes <= self._max_bytes
