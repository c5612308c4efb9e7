"""What a coordinator asks of a worker's memory, as one message, and who answers it in this process.

`start` and `finish` are apart, so that all workers of an engine are at it together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from xllm_npu.memory.worker_residency import WorkerResidency
from xllm_npu.memory.worker_resources import WorkerMemoryResources

Verb = Literal[
    "growable", "prepare", "commit", "abort", "unmap",  # growth of the KV cache
    "weight_pages", "weights_hash", "prepare_sleep", "commit_sleep", "prepare_wake", "commit_wake", "finish_wake",
]  # fmt: skip
LONG_VERBS = frozenset((  # they move all weights, or take their memory, which a CPU clears
    "weights_hash", "prepare_sleep", "commit_sleep", "prepare_wake", "commit_wake"))


class MemoryCall(msgspec.Struct, array_like=True, kw_only=True):
    verb: Verb
    transaction: int = -1
    offsets: list[int] = msgspec.field(default_factory=list)  # bytes, in every KV region
    level: int = 0  # of a sleep
    tags: list[str] = msgspec.field(default_factory=list)  # of a wake-up


class WorkerMemory(Protocol):
    """One worker's memory, here or in another process; one call at a time."""

    def start(self, call: MemoryCall) -> None: ...

    def finish(self) -> int:
        """The answer: pages to `growable` and `weight_pages`, the hash, bytes given back to `commit_sleep`; else 0.

        Raises what the worker raised, or that it did not answer.
        """
        ...


def perform(resources: WorkerMemoryResources, call: MemoryCall) -> int:
    """Do it here. Raises what it raises; MemoryOwnershipLost is fatal."""
    return _VERBS[call.verb](resources, call)


def _abort(resources: WorkerMemoryResources, call: MemoryCall) -> int:
    resources.abort(call.transaction)
    if resources.residency is not None:
        resources.residency.abort(call.transaction)
    return 0


def _none(action: Callable[[WorkerMemoryResources, MemoryCall], None]
          ) -> Callable[[WorkerMemoryResources, MemoryCall], int]:
    def run(resources: WorkerMemoryResources, call: MemoryCall) -> int:
        action(resources, call)
        return 0

    return run


def _residency(resources: WorkerMemoryResources) -> WorkerResidency:
    if resources.residency is None:
        raise RuntimeError("The weights are not in virtual memory.")
    return resources.residency


_VERBS: dict[str, Callable[[WorkerMemoryResources, MemoryCall], int]] = {
    "growable": lambda r, call: r.growable_pages() if r.has_kv else r.growable_bytes() // r.pool.page_bytes,
    "prepare": _none(lambda r, call: r.prepare(call.transaction, call.offsets)),
    "commit": _none(lambda r, call: r.commit(call.transaction)),
    "abort": _abort,
    "unmap": _none(lambda r, call: r.unmap(call.offsets)),
    "weight_pages": lambda r, call: 0 if r.weights is None else r.weights.num_pages,
    "weights_hash": lambda r, call: _residency(r).weights_hash(),
    "prepare_sleep": _none(lambda r, call: _residency(r).prepare_sleep(call.transaction, call.level)),
    "commit_sleep": lambda r, call: _residency(r).commit_sleep(call.transaction),
    "prepare_wake": _none(lambda r, call: _residency(r).prepare_wake(call.transaction, call.tags)),
    "commit_wake": _none(lambda r, call: _residency(r).commit_wake(call.transaction)),
    "finish_wake": _none(lambda r, call: _residency(r).finish_wake(call.transaction)),
}


class LocalWorkerMemory:
    def __init__(self, resources: WorkerMemoryResources) -> None:
        self._resources = resources
        self._call: MemoryCall | None = None

    def start(self, call: MemoryCall) -> None:
        self._call = call

    def finish(self) -> int:
        call, self._call = self._call, None
        assert call is not None, "finish() without start()"
        return perform(self._resources, call)
