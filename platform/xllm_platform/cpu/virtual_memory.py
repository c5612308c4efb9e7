"""Virtual memory on any Linux machine: one anonymous file (memfd_create) whose pieces are mapped with mmap.

A physical page is a piece of the file: fallocate commits it, a punched hole gives it back to the system, wherever it
was mapped before. A reserved range is mapped without access; touching it where no page is mapped ends the process, as
it would fault on a device. A committed page reads as zero. Each mapping is one of the process's `vm.max_map_count`.

A page that other processes have too is theirs by a shared lock of their open file description (record_locks.py) on its
piece of the file: who releases it and then gets the lock alone was the last, and punches the hole.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xllm_platform.base import OutOfMemoryError, PlatformError, VirtualMemoryDriver
from xllm_platform.record_locks import set_lock

if TYPE_CHECKING:
    import torch

_NO_ACCESS, _READ, _READ_WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE: not in Python's mmap module
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*, linux/falloc.h
_ASK_SECONDS = 0.05  # an answer about free memory is used for so long
_FAILED = ctypes.c_void_p(-1).value
_NAME = "xllm-npu-pages"
_MEANINGS = {
    errno.ENOMEM: "no memory is left, or the process has as many mappings as vm.max_map_count allows",
    errno.ENOSPC: "no memory is left",
}


class MemfdVirtualMemory(VirtualMemoryDriver):
    new_pages_are_zero = True

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        """`free_bytes`: what can be had without swapping; a page that needs more is refused."""
        self._free_bytes = free_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                                    ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._lock = threading.RLock()
        self._free, self._asked = 0, 0.0  # bytes free when last asked, less what was taken since; and when
        self._end = 0  # of the file
        self._holes: dict[int, list[int]] = {}  # size -> offsets of given back pieces of the file
        self._pages: dict[int, tuple[int, int, int]] = {}  # handle -> file, offset, size
        self._last_page = 0
        self._exported: set[int] = set()  # handles
        self._left: list[tuple[int, int]] = []  # offset, size of pieces that were released and others have still
        self._shared_once: set[int] = set()  # offsets at which others may be about to punch a hole
        self._others: dict[tuple[int, int], int] = {}  # device, inode of another process's file -> our description
        self._uses: dict[int, int] = {}  # handle -> mappings; only those that have some
        self._ranges: dict[int, int] = {}  # address -> size
        self._range_starts: list[int] = []  # ascending, as are the next
        self._mapping_starts: list[int] = []
        self._mappings: dict[int, int] = {}  # address -> handle

    @property
    def granularity(self) -> int:
        return mmap.PAGESIZE

    def reserve(self, size: int) -> int:
        self._check_size(size)
        with self._lock:
            address = self._map_nothing(None, size)
            self._ranges[address] = size
            insort(self._range_starts, address)
        return address

    def free_range(self, address: int) -> None:
        with self._lock:
            size = self._ranges.get(address)
            if size is None:
                raise PlatformError(f"munmap: no range begins at {address:#x}.")
            if self._mapped_between(address, address + size):
                raise PlatformError(f"munmap: pages are mapped in the range at {address:#x}.")
            if self._libc.munmap(address, size):
                raise _error("munmap")
            del self._ranges[address]
            self._range_starts.remove(address)

    def create_page(self, size: int) -> int:
        self._check_size(size)
        with self._lock:
            self._check_free(size)
            self._punch_what_was_left()
            holes = self._holes.get(size)
            offset = holes.pop() if holes else self._end
            if offset in self._shared_once:
                set_lock(self._file, "alone", offset, size, wait=True)
                set_lock(self._file, "free", offset, size)
            if self._libc.fallocate(self._file, 0, offset, size):
                error = _error("fallocate")
                self._libc.fallocate(self._file, _PUNCH_HOLE | _KEEP_SIZE, offset, size)  # it may have got a part
                self._holes.setdefault(size, []).append(offset)
                self._end = max(self._end, offset + size)
                raise error
            self._end = max(self._end, offset + size)
            self._free -= size
            self._last_page += 1
            self._pages[self._last_page] = self._file, offset, size
            return self._last_page

    def release_page(self, page: int) -> None:
        with self._lock:
            file, offset, size = self._place(page)
            if page in self._uses:
                raise PlatformError(f"fallocate: page {page} is mapped {self._uses[page]} times; unmap it first.")
            if page in self._exported or file != self._file:
                self._give_up(file, offset, size)
            else:
                self._punch(file, offset, size)
            del self._pages[page]
            self._exported.discard(page)

    def export_page(self, page: int, importer: int) -> int:
        """Its position is where the page begins, and its lock keeps the page on the way."""
        with self._lock:
            file, offset, size = self._place(page)
            if file != self._file:
                raise PlatformError(f"Page {page} is another process's, which alone can export it.")
            passed = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
            for description in (file, passed):
                set_lock(description, "shared", offset, size)
            os.lseek(passed, offset, os.SEEK_SET)
            self._exported.add(page)
            self._shared_once.add(offset)
            return passed

    def import_page(self, exported: int, size: int) -> int:
        self._check_size(size)
        with self._lock:
            found = os.fstat(exported)
            if _NAME not in os.readlink(f"/proc/self/fd/{exported}"):
                raise PlatformError("The descriptor is not that of a page.")
            file = self._others.get((found.st_dev, found.st_ino))
            if file is None:
                file = os.open(f"/proc/self/fd/{exported}", os.O_RDWR | os.O_CLOEXEC)
                weakref.finalize(self, os.close, file)
                self._others[found.st_dev, found.st_ino] = file
            offset = os.lseek(exported, 0, os.SEEK_CUR)
            if offset + size > found.st_size:
                raise PlatformError(f"The descriptor has no page of {size} bytes.")
            set_lock(file, "shared", offset, size)
            self._last_page += 1
            self._pages[self._last_page] = file, offset, size
            return self._last_page

    def _give_up(self, file: int, offset: int, size: int) -> None:
        """A page that other processes may have too."""
        set_lock(file, "free", offset, size)
        try:
            set_lock(file, "alone", offset, size)
        except BlockingIOError:
            if file == self._file:
                self._left.append((offset, size))
            return
        try:
            self._punch(file, offset, size)
        finally:
            set_lock(file, "free", offset, size)

    def _punch_what_was_left(self) -> None:
        """The last who had a piece has punched it, unless it was ended."""
        left, self._left = self._left, []
        for offset, size in left:
            self._give_up(self._file, offset, size)

    def _punch(self, file: int, offset: int, size: int) -> None:
        if self._libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, offset, size):
            raise _error("fallocate")
        if file == self._file:
            self._holes.setdefault(size, []).append(offset)

    def map(self, address: int, page: int) -> None:
        if address % self.granularity:
            raise PlatformError(f"mmap: address {address:#x} is no multiple of the granularity, {self.granularity}.")
        with self._lock:
            file, offset, size = self._place(page)
            i = bisect_right(self._range_starts, address) - 1
            start = self._range_starts[i] if i >= 0 else 0
            if i < 0 or address + size > start + self._ranges[start]:
                raise PlatformError(f"mmap: {address:#x} and {size} bytes on lie in no reserved range.")
            if self._mapped_between(address, address + size):
                raise PlatformError(f"mmap: a page is mapped at {address:#x} already.")
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _FIXED  # populated now: who touches it need not wait
            access = _READ_WRITE if file == self._file else _READ
            if self._libc.mmap(address, size, access, flags, file, offset) == _FAILED:
                error = _error("mmap")
                self._map_nothing(address, size)
                raise error
            self._mappings[address] = page
            insort(self._mapping_starts, address)
            self._uses[page] = self._uses.get(page, 0) + 1

    def unmap(self, address: int) -> None:
        with self._lock:
            page = self._mappings.get(address)
            if page is None:
                raise PlatformError(f"mmap: no mapping begins at {address:#x}.")
            self._map_nothing(address, self._pages[page][2])
            del self._mappings[address]
            del self._mapping_starts[bisect_left(self._mapping_starts, address)]
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]

    def view(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(*shape)

    def _map_nothing(self, address: int | None, size: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | (_FIXED if address else 0)
        found = self._libc.mmap(address, size, _NO_ACCESS, flags, -1, 0)
        if found == _FAILED:
            raise _error("mmap")
        return int(found)

    def _mapped_between(self, begin: int, end: int) -> bool:
        i = bisect_left(self._mapping_starts, begin)
        if i < len(self._mapping_starts) and self._mapping_starts[i] < end:
            return True
        before = self._mapping_starts[i - 1] if i else None
        return before is not None and before + self._pages[self._mappings[before]][2] > begin

    def _check_free(self, size: int) -> None:
        """Asking takes longer than making a page, and pages are made by the dozen."""
        now = time.monotonic()
        if size > self._free or now - self._asked > _ASK_SECONDS:
            self._free, self._asked = self._free_bytes(), now
        if size > self._free:
            raise OutOfMemoryError(f"fallocate: a page of {size} bytes, and {self._free} bytes are free.")

    def _check_size(self, size: int) -> None:
        if size <= 0 or size % self.granularity:
            raise PlatformError(f"{size} bytes are no multiple of the granularity, {self.granularity}.")

    def _place(self, page: int) -> tuple[int, int, int]:
        if page not in self._pages:
            raise PlatformError(f"There is no page {page:#x}.")
        return self._pages[page]


def _error(call: str) -> PlatformError:
    code = ctypes.get_errno()
    kind = OutOfMemoryError if code in _MEANINGS else PlatformError
    return kind(f"{call} failed with {code}: {_MEANINGS.get(code, os.strerror(code))}")
