"""The fake CANN's own functions, by ctypes: its counters, what a stream does, operators as nodes of graphs."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

_FIELDS = ("malloc_calls", "malloc_bytes_live", "physical_bytes_live", "mappings_live", "streams_live", "events_live",
           "graphs_live", "memcpy_calls", "h2d_bytes", "d2h_bytes", "d2h_calls", "syncs", "graph_launches",
           "task_updates")  # as in fakecann/fake.h


class Counters(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _FIELDS]

    def since(self, before: Counters) -> dict[str, int]:
        return {name: getattr(self, name) - getattr(before, name) for name in _FIELDS}


RUNS, CAPTURES, UPDATES = 0, 1, 2  # what a stream does with an operator

acl = ctypes.CDLL("libascendcl.so")
acl.fakecann_submit_operator.argtypes = [ctypes.c_void_p]
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
acl.fakecann_record_operator.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
acl.fakecann_record_operator.restype = None
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_uint64)

_nodes: dict[int, Callable[[], None]] = {}  # operators of the graphs that exist
_numbers = itertools.count(1)
_errors: list[BaseException] = []


@_Callback
def _run(number: int) -> None:
    try:
        _nodes[number]()
    except BaseException as error:  # cannot be raised through C; replay() raises it
        _errors.append(error)


@_Callback
def _release(number: int) -> None:
    _nodes.pop(number, None)


acl.fakecann_set_callbacks(_run, _release)


def counters() -> Counters:
    found = Counters()
    acl.fakecann_counters(ctypes.byref(found))
    return found


def abandon_graphs() -> None:
    """Graphs that wait for an event go away: after a test in which they must."""
    acl.fakecann_abandon_graphs()
    _errors.clear()


def num_nodes() -> int:
    return len(_nodes)


def submit(stream: int) -> int:
    """RUNS, CAPTURES or UPDATES: what `stream` does with the operator that comes now."""
    state = acl.fakecann_submit_operator(stream)
    if state < 0:
        raise RuntimeError(acl.aclGetRecentErrMsg().decode())
    return state


def record(stream: int, operator: Callable[[], None]) -> None:
    """`operator` becomes the next node of what `stream` captures or updates."""
    number = next(_numbers)
    _nodes[number] = operator
    acl.fakecann_record_operator(stream, number)


def raise_error_of_replay() -> None:
    if _errors:
        error = _errors[0]
        _errors.clear()
        raise error
