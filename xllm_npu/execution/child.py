"""What every child process of ours does: one line of orders on standard input, which then is the parent's sign of life;
and how it says what went wrong.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable

STDIN = 0
EXIT_ORPHANED = 1


def read_line() -> bytes:
    """The first line, without taking more than it; empty if the parent died before it said anything."""
    with open(STDIN, "rb", buffering=0, closefd=False) as stdin:
        return stdin.readline()


def follow_parent(last: Callable[[], None] = lambda: None) -> None:
    """End this process when standard input ends: the parent is gone, however it went. `last` is called before."""

    def follow() -> None:
        while os.read(STDIN, 1):  # not sys.stdin: the interpreter waits for its lock when it ends
            pass
        last()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=follow, name="parent", daemon=True).start()


def remove_directory(path: str) -> None:
    """With all that is in it, while other threads may still be making sockets there: they find it gone."""
    gone = f"{path}-gone"
    try:
        os.rename(path, gone)
    except OSError:  # somebody else removes it, or it was never made
        return
    shutil.rmtree(gone, ignore_errors=True)


def describe(error: BaseException) -> str:
    """One sentence for people: our own errors speak for themselves, others are named."""
    text = " ".join(str(error).split()) or "no details"
    return text if speaks_for_itself(error) else f"{type(error).__name__}: {text}"


def lacks_memory(error: BaseException) -> bool:
    """It, or what caused it, says that more memory of the device might have helped."""
    from xllm_platform.base import OutOfMemoryError

    from xllm_npu.memory.kv_capacity import CacheTooSmall
    from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused

    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # an error may be raised from itself
        if isinstance(cause, CacheTooSmall | PageGrowthRefused | OutOfMemoryError):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def explains(error: BaseException) -> bool:
    """It says what happened. Any other exception may come from the end of a rank that this one computed with."""
    return speaks_for_itself(error) and not getattr(error, "foreign", False)


def speaks_for_itself(error: BaseException) -> bool:
    """One of our own errors, whose message tells the user what to do; others need their traceback in the log."""
    return type(error).__module__.split(".")[0] in ("xllm_npu", "xllm_models", "xllm_platform")
