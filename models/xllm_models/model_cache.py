"""The user's own cache of converted models and tokenizers: where it lies and how an entry is made.

An entry is made beside its place and renamed into it, under a lock that other processes wait for: whoever
sees an entry sees all of it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class HubError(RuntimeError):
    """A model cannot be found, downloaded or stored; one sentence says what to do."""


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, or xllm-npu's folder in $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "xllm-npu"


def cached(entry: Path, is_complete: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """`entry`, made by `make(temporary directory)` unless it is complete already. Raises HubError."""
    if is_complete(entry):
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_name(f".{entry.name}.lock")):
            if is_complete(entry):  # another process made it meanwhile
                return entry
            _make(entry, make)
    except OSError as error:
        raise HubError(
            f"{entry} cannot be written ({error.strerror or error}). Free space or permissions there, or set "
            "XDG_CACHE_HOME to a directory you can write."
        ) from error
    return entry


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        make(temporary)
        temporary.chmod(0o755)  # mkdtemp's 0700 would keep other users of a shared cache out
        shutil.rmtree(entry, ignore_errors=True)  # an incomplete one
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the file closes, a killed process's too
        yield
