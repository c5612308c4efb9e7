"""How far host memory rises above where it was. Knows nothing of what raises it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")


class HostMemoryPeak:
    """Measures from its making on: `sample` now and then, `rise` at the end.

    The system keeps a process's highest mark but not one for a stretch of its life; so the mark counts where the
    stretch raised it, and samples do where it did not. File pages that are mapped count while they are.
    """

    def __init__(self) -> None:
        self._start, self._mark = resident_bytes(), highest_resident_bytes()
        self._peak = self._start

    def sample(self) -> None:
        self._peak = max(self._peak, resident_bytes())

    def rise(self) -> int:
        """Bytes above the start, at least 0."""
        self.sample()
        mark = highest_resident_bytes()
        return max(self._peak, mark if mark > self._mark else 0) - self._start


def resident_bytes() -> int:
    """Of this process now; the highest there was where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return highest_resident_bytes()


def highest_resident_bytes() -> int:
    """The most this process has had. getrusage's figure survives an exec, the system's status does not have that."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024
