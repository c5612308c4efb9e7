"""What a model's engines say of themselves with their outputs, for metrics, admission and the admin's status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from xllm_npu.master.memory_report import MemoryReport
from xllm_npu.master.queue_gauge import QueueGauge

if TYPE_CHECKING:
    from xllm_npu.master.adapters import Adapters
    from xllm_npu.master.model_residency import ResidencyState
    from xllm_npu.metrics import Metrics
    from xllm_npu.state.messages import EngineReady, EngineStats


class EngineFigures:
    """Of one model; `rank` is an engine's."""

    def __init__(self, metrics: Metrics, adapters: Adapters) -> None:
        self._metrics, self._adapters = metrics, adapters
        self._memory = MemoryReport()
        self._queue = QueueGauge()
        self._stalled: set[int] = set()

    @property
    def stalled(self) -> bool:
        """Requests are open that cannot go on, because others have the memory that they need."""
        return bool(self._stalled)

    @property
    def num_waiting(self) -> int:
        """Requests that no step has taken up yet."""
        return self._queue.waiting

    def memory_info(self, residency: ResidencyState) -> dict[str, Any]:
        """See `MemoryReport.info`; without virtual memory there are no owners."""
        return self._memory.info(residency)

    def on_sent(self, rank: int) -> None:
        """A request was sent to that engine."""
        self._queue.on_sent(rank)

    def on_ready(self, model: str, engines: Sequence[EngineReady]) -> None:
        self._memory.on_ready(engines)
        self._queue = QueueGauge(len(engines), engines[0].max_seqs)
        self._metrics.set_model(model, [{"block_size": e.block_size, "num_kv_blocks": e.num_kv_blocks}
                                        for e in engines])
        for rank, engine in enumerate(engines):
            self._metrics.set_engine(rank, owned_pages={one.owner: one.bytes for one in engine.owned_pages})

    def on_exit(self) -> None:
        self._stalled.clear()

    def on_stats(self, rank: int, stats: EngineStats) -> None:
        self._memory.on_stats(rank, stats)
        self._queue.on_stats(rank, stats.running, stats.waiting)
        (self._stalled.add if stats.stalled else self._stalled.discard)(rank)
        figures = msgspec.structs.asdict(stats)
        if stats.pages is not None:
            figures["pages"] = msgspec.structs.asdict(stats.pages)
        if self._adapters.enabled:
            name_of = self._adapters.name_of
            self._metrics.set_loras(rank, self._adapters.settings.max_loras, [name_of(i) for i in stats.running_loras],
                                    [name_of(i) for i in stats.waiting_loras])
        figures["owned_pages"] = {one.owner: one.bytes for one in stats.owned_pages}
        self._metrics.set_engine(rank, **figures)
