"""Directories with short names: a Unix socket's path has at most 107 characters, and pytest's directories are long."""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import tempfile
from pathlib import Path

_numbers = itertools.count()


def short_directory() -> Path:
    """A new one, which goes when this process ends."""
    directory = _base() / str(next(_numbers))
    directory.mkdir()
    return directory


@functools.cache
def _base() -> Path:
    base = tempfile.mkdtemp(prefix="xt-")
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    return Path(base)
