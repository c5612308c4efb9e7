"""What a coordinator asks of a worker's memory, as one message, and who answers it in this process.

`start` and `finish` are apart, so that all workers of an engine are at it together.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from xllm_npu.memory.worker_resources import WorkerMemoryResources


class MemoryCall(msgspec.Struct, array_like=True, kw_only=True):
    verb: Literal["growable", "prepare", "commit", "abort", "unmap"]
    transaction: int = -1
    offsets: list[int] = msgspec.field(default_factory=list)  # bytes, in every KV region


class WorkerMemory(Protocol):
    """One worker's memory, here or in another process; one call at a time."""

    def start(self, call: MemoryCall) -> None: ...

    def finish(self) -> int:
        """The answer to `growable` (pages), else 0. Raises what the worker raised, or that it did not answer."""
        ...


def perform(resources: WorkerMemoryResources, call: MemoryCall) -> int:
    if call.verb == "growable":
        return resources.growable_pages()
    if call.verb == "prepare":
        resources.prepare(call.transaction, call.offsets)
    elif call.verb == "commit":
        resources.commit(call.transaction)
    elif call.verb == "abort":
        resources.abort(call.transaction)
    else:
        resources.unmap(call.offsets)
    return 0


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
