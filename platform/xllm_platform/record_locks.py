"""Locks on pieces of a file that belong to an open file description (F_OFD_SETLK in fcntl(2)).

All processes that have the description hold them together, and the kernel gives them back when the last of these has
closed it or ended, in whatever way. They are advisory, and may lie beyond the file's end.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Literal

_KINDS = {"shared": fcntl.F_RDLCK, "alone": fcntl.F_WRLCK, "free": fcntl.F_UNLCK}
_FLOCK = struct.Struct("hhqqi")


def set_lock(file: int, kind: Literal["shared", "alone", "free"], begin: int, length: int, wait: bool = False) -> None:
    """Raises BlockingIOError if another description has a lock that forbids it, and this is not to wait for it."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK,
                _FLOCK.pack(_KINDS[kind], os.SEEK_SET, begin, length, 0))


def is_locked(file: int, begin: int, length: int) -> bool:
    """By another description than this one."""
    answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, length, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
