"""What a model's engines hold of virtual memory, put together from what they say: `virtual_memory_info` of a heartbeat.

Pages are physical ones, over all devices of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from xllm_npu.master.model_residency import ResidencyState
from xllm_npu.state.kv_cache.page_allocator import PageStats
from xllm_npu.state.messages import KV_CACHE_TAG, EngineReady, EngineStats, OwnedPages

PAGE_STATES = ("mapped", "free", "pinned", "reserved")


class MemoryReport:
    def __init__(self) -> None:
        self._owned: list[list[OwnedPages]] = []  # by rank
        self._pages: list[PageStats | None] = []

    def on_ready(self, engines: Sequence[EngineReady]) -> None:
        """New engines; these are all."""
        self._owned = [engine.owned_pages for engine in engines]
        self._pages = [None for _ in engines]

    def on_stats(self, rank: int, stats: EngineStats) -> None:
        if rank < len(self._owned):
            self._owned[rank] = stats.owned_pages
            self._pages[rank] = stats.pages

    def info(self, residency: ResidencyState) -> dict[str, Any]:
        """Pages mapped, free (they could be mapped, if memory allows), pinned (mapped for as long as it is awake) and
        reserved (mapped ahead), and bytes mapped, by owner; refusals of growth by reason; residency.
        """
        owners: dict[str, dict[str, int]] = {}
        refusals: Counter[str] = Counter()
        for owned, stats in zip(self._owned, self._pages):
            for one in owned:
                counts = owners.setdefault(one.owner, dict.fromkeys((*PAGE_STATES, "bytes"), 0))
                for name, count in _counts(one, stats).items():
                    counts[name] += count
            if stats is not None:
                refusals.update(stats.refusals)
        return {
            "residency": {"state": residency.state, "level": residency.level, "tags": list(residency.tags)},
            "bytes": sum(counts["bytes"] for counts in owners.values()),
            "owners": owners, "growth_refusals": dict(refusals),
        }


def _counts(owned: OwnedPages, stats: PageStats | None) -> dict[str, int]:
    """Of one engine."""
    reserved = 0 if stats is None or owned.owner != KV_CACHE_TAG else stats.reserved * owned.together
    counts = {"mapped": owned.mapped, "free": owned.slots - owned.mapped, "pinned": owned.pinned,
              "reserved": min(reserved, owned.mapped)}
    counts = {name: count * owned.ranks for name, count in counts.items()}
    return {**counts, "bytes": owned.bytes}
