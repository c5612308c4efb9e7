"""The virtual memory of an engine: the coordinator over all of its ranks, connected."""

from __future__ import annotations

from collections.abc import Sequence

from xllm_npu.execution.worker_group import WorkerGroup
from xllm_npu.execution.worker_messages import WorkerReady
from xllm_npu.memory.coordinator import DistributedVirtualMemoryCoordinator
from xllm_npu.memory.worker_memory import LocalWorkerMemory
from xllm_npu.memory.worker_memory_registry import WorkerMemoryRegistry
from xllm_npu.memory.worker_memory_rpc import WorkerMemoryRpcClient
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.messages import KV_CACHE_TAG, WEIGHTS_TAG, OwnedPages


class EngineMemory(DistributedVirtualMemoryCoordinator):
    """Rank 0's resources are here; the other ranks said at which endpoints theirs take calls."""

    def __init__(self, first: WorkerMemoryResources, others: Sequence[WorkerMemoryRpcClient]) -> None:
        self._clients, self._page_bytes = others, first.pool.page_bytes
        super().__init__([LocalWorkerMemory(first), *others], first.layout if first.has_kv else None,
                         elastic=first.elastic, has_weights=first.weights is not None)

    def owned_pages(self) -> list[OwnedPages]:
        """What the ledger says; costs little."""
        owned: list[OwnedPages] = []
        if self.has_weights:
            mapped = self.budget.reserved(WEIGHTS_TAG)
            owned.append(OwnedPages(owner=WEIGHTS_TAG, page_bytes=self._page_bytes, mapped=mapped, pinned=mapped,
                                    slots=self._at_rest[WEIGHTS_TAG], ranks=len(self._workers)))
        if self._layout is not None:
            mapped, regions = self.budget.reserved(KV_CACHE_TAG), self._layout.num_regions
            pinned = min(mapped, self._at_rest[KV_CACHE_TAG])
            owned.append(OwnedPages(owner=KV_CACHE_TAG, page_bytes=self._page_bytes, mapped=mapped, pinned=pinned,
                                    slots=self._layout.num_pages * regions, together=regions, ranks=len(self._workers)))
        return owned

    def close(self) -> None:
        for client in self._clients:
            client.close()


def connect_memory(
    first: WorkerMemoryResources | None, others: Sequence[WorkerReady], group: WorkerGroup | None,
    registry: WorkerMemoryRegistry | None = None,
) -> EngineMemory | None:
    """None where nothing ever changes. `registry`: where those on several machines said their endpoints.

    Raises what a rank answers that cannot be reached.
    """
    if first is None or not first.takes_calls:
        return None

    def check() -> None:
        if group is not None and group.failure is not None:
            raise group.failure

    endpoints = {ready.rank: ready.memory if registry is None else registry.endpoint_of(ready.rank) for ready in others}
    return EngineMemory(first, [WorkerMemoryRpcClient(endpoint, rank, check) for rank, endpoint in endpoints.items()])
