"""What is raised where a failed operation could not be undone: the one error of memory that ends an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MemoryOwnershipLost(RuntimeError):
    """Pages could not be given back, so that nobody knows any more whose they are. The engine must end."""


@contextmanager
def undoing(what: str) -> Iterator[None]:
    """Whatever fails inside means that ownership is lost."""
    try:
        yield
    except MemoryOwnershipLost:
        raise
    except Exception as error:
        raise MemoryOwnershipLost(f"{what} could not be undone: {error}") from error
