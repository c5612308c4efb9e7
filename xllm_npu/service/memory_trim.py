"""What large requests have taken and given back goes back to the system.

glibc keeps what a thread has freed in that thread's arena: to tokenize a mebibyte of text takes some seventy, for each
thread that has ever done it. Looked at every few seconds; trimming takes milliseconds, on a thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

SECONDS = 5.0
STEP_BYTES = 64 << 20  # by which the process has to have grown


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def malloc_trim() -> Callable[[], object] | None:
    """glibc's; None for other C libraries."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if found is None else lambda: found(0)


class MemoryTrim:
    def __init__(self, trim: Callable[[], object] | None, resident: Callable[[], int] = resident_bytes) -> None:
        self._trim, self._resident = trim, resident
        self._least: int | None = None  # bytes; after the last trim, or less

    async def run(self) -> None:
        while self._trim is not None:
            await self.look()
            await asyncio.sleep(SECONDS)

    async def look(self) -> None:
        now = self._resident()
        if self._least is None or now < self._least:
            self._least = now
        if now >= self._least + STEP_BYTES and self._trim is not None:
            await asyncio.to_thread(self._trim)
            self._least = self._resident()
