"""What all processes that have memory on one device have reserved of it, in a file that they share.

One ledger a device of a machine, under every model and every rank on it, so that ceilings count for all together. Each
process has a slot with the bytes it has reserved; a slot counts for as long as somebody holds its lock, which the
kernel gives back when a process ends in whatever way. A `LedgerShare` is a slot whose lock several processes hold, for
memory that lives until the last lets go of it (see xllm_platform.record_locks). Everybody brings a limit along, for
what all together may have. Knows bytes; no pages, no device.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from xllm_platform.base import OutOfMemoryError
from xllm_platform.record_locks import is_locked, set_lock

NUM_SLOTS = 1024
_SLOT = struct.Struct("=Q")
_BYTES = NUM_SLOTS * _SLOT.size
_MUTEX, _LIVES = 1 << 30, 1 << 31  # bytes of the file, beyond its end, that are locked: for a change; by slots


class DeviceFull(OutOfMemoryError):
    """More would be reserved on the device than may be."""


class DeviceLedger:
    """This process's slot. Safe for threads."""

    def __init__(self, path: str | Path, limit: int = 2**62) -> None:
        """Made if nobody has yet; its directory exists. `limit`: bytes that all together may have when this reserves.

        Raises OSError; RuntimeError if all slots are taken.
        """
        self._path, self.limit = Path(path), limit
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._file, _BYTES)
            self._slots = mmap.mmap(self._file, _BYTES)
            with self._alone():
                self._own = self._take_slot(self._file)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def reserved(self) -> int:
        """Bytes, by this process."""
        return self._value(self._own)

    @property
    def total(self) -> int:
        """Bytes reserved by all that live."""
        with self._alone():
            return self._sum()

    @property
    def left(self) -> int:
        """Bytes that the limit allows now; below 0 if others, with a higher one, have taken more."""
        return self.limit - self.total

    def reserve(self, count: int) -> None:
        """Raises DeviceFull if all together would pass the limit; nothing is reserved then."""
        assert count >= 0
        with self._alone():
            total = self._sum()
            if total + count > self.limit:
                raise DeviceFull(f"{total} bytes are reserved on the device, and {count} more would pass the limit of "
                                 f"{self.limit}.")
            self._set(self._own, self._value(self._own) + count)

    def release(self, count: int) -> None:
        with self._alone():
            left = self._value(self._own) - count
            assert left >= 0, f"{-left} bytes more are released than were reserved"
            self._set(self._own, left)

    def share(self, count: int) -> LedgerShare:
        """Move reserved bytes into a share: counted until the last process that has it closes it or ends."""
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC)  # a description, and a lock, of its own
        try:
            with self._alone():
                left = self._value(self._own) - count
                assert left >= 0, "more bytes are shared than were reserved"
                slot = self._take_slot(file)
                self._set(slot, count)
                self._set(self._own, left)
        except BaseException:
            os.close(file)
            raise
        return LedgerShare(file, count)

    def take_back(self, share: LedgerShare) -> None:
        """The bytes of a share that nobody else has any more are this process's own again."""
        with self._alone():
            self._set(self._own, self._value(self._own) + share.count)
            share.close()

    def close(self) -> None:
        """What is still reserved counts no more."""
        with self._lock:
            if self._file >= 0:
                self._slots.close()
                os.close(self._file)
                self._file = -1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:  # threads of this process share the description, and so its locks
            set_lock(self._file, "alone", _MUTEX, 1, wait=True)
            try:
                yield
            finally:
                set_lock(self._file, "free", _MUTEX, 1)

    def _take_slot(self, file: int) -> int:
        for slot in range(NUM_SLOTS):
            with contextlib.suppress(BlockingIOError):
                set_lock(file, "alone", _LIVES + slot, 1)
                self._set(slot, 0)
                return slot
        raise RuntimeError(f"{self._path} has slots for {NUM_SLOTS} processes, and all are taken.")

    def _sum(self) -> int:
        """Slots of those that have ended are emptied."""
        total = 0
        for slot, (value,) in enumerate(_SLOT.iter_unpack(self._slots[:])):
            if value and slot != self._own and not is_locked(self._file, _LIVES + slot, 1):
                self._set(slot, 0)
            else:
                total += value
        return total

    def _value(self, slot: int) -> int:
        return int(_SLOT.unpack_from(self._slots, slot * _SLOT.size)[0])

    def _set(self, slot: int, value: int) -> None:
        _SLOT.pack_into(self._slots, slot * _SLOT.size, value)


class LedgerShare:
    """Bytes that several processes have reserved together: whoever has a copy of the descriptor `file`."""

    def __init__(self, file: int, count: int) -> None:
        """Takes the descriptor over, which may come from another process."""
        self.file, self.count = file, count

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
