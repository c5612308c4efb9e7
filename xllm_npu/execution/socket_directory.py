"""Where directories of Unix sockets are made: the system's temporary directory, unless that has a long name."""

from __future__ import annotations

import os
import tempfile

LONGEST_PATH = 107  # of a Unix socket, in bytes: sun_path in unix(7)
ROOM = 48  # for the directory's own name and those in it
FALLBACK = "/tmp"


def socket_parent() -> str:
    """TMPDIR of a batch system may be longer than a socket's path can be; the fallback is used for sockets alone."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) + ROOM > LONGEST_PATH and os.access(FALLBACK, os.W_OK | os.X_OK):
        return FALLBACK
    return parent
