"""The ledger of physical pages: who has reserved how many, of those that are there.

Slots become active as growth allows; a reservation never exceeds the active ones. Reservations are made before pages
are, and returned after all workers have given theirs back, so that the ledger is never below the pool. Generic: its
owners are names ("weights", "kv_cache").
"""

from __future__ import annotations

import threading


class LedgerFull(RuntimeError):
    """More is reserved than slots are active."""


class WorkerPhysicalPageBudget:
    def __init__(self, num_slots: int, active: int) -> None:
        """`num_slots` ids exist; `active` of them may be used from the start."""
        self.num_slots = num_slots
        self._active = min(active, num_slots)
        self._reserved: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def active(self) -> int:
        return self._active

    @property
    def total_reserved(self) -> int:
        with self._lock:
            return sum(self._reserved.values())

    def reserved(self, owner: str) -> int:
        with self._lock:
            return self._reserved.get(owner, 0)

    def activate(self, slots: int) -> None:
        """Growth has been allowed up to so many slots; never fewer than before."""
        with self._lock:
            self._active = max(self._active, min(slots, self.num_slots))

    def reserve(self, wanted: dict[str, int]) -> None:
        """For several owners at once, all or nothing. Raises LedgerFull."""
        with self._lock:
            total = sum(self._reserved.values()) + sum(wanted.values())
            if total > self._active:
                raise LedgerFull(f"{total} physical pages would be reserved and {self._active} may be.")
            for owner, count in wanted.items():
                assert count >= 0
                self._reserved[owner] = self._reserved.get(owner, 0) + count

    def release(self, owner: str, count: int) -> None:
        with self._lock:
            left = self._reserved.get(owner, 0) - count
            assert left >= 0, f"{owner} returns {-left} pages more than it reserved"
            self._reserved[owner] = left

    def check_integrity(self) -> None:
        with self._lock:
            assert all(count >= 0 for count in self._reserved.values())
            assert sum(self._reserved.values()) <= self._active <= self.num_slots
