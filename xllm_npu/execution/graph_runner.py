"""Decode steps through captured graphs, one for each batch-size bucket; behind the platform's graph interface.

Capture goes from the largest size down, so that smaller graphs reuse the memory of larger ones. A batch runs in the
smallest bucket that holds it, padded with rows that touch only the dummy block. Where requests may have adapters each
size is captured twice, so that batches without any do not pay for them. An attention backend that is told
lengths by the host gets the platform's `GraphTasks` while graphs are captured; `prepare` then sets what the replay
tells it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch
from xllm_models.attention.base import PagedBackend
from xllm_models.forward_input import ForwardInput
from xllm_platform.base import Graph, GraphBackend

from xllm_npu.execution.input_builder import InputBuilder

Forward = Callable[[ForwardInput], torch.Tensor]


class GraphRunner:
    def __init__(self, backend: GraphBackend, model: torch.nn.Module, attention: PagedBackend) -> None:
        self._backend = backend
        self._attention = attention
        self._model = model
        self._backend.prepare_model(model)
        self._graphs: dict[tuple[int, bool], Graph] = {}  # by size, and whether rows may have adapters
        self.sizes: list[int] = []

    def capture(self, sizes: list[int], builder: InputBuilder, on_progress: Callable[[int, int], None],
                dp_size: int = 1) -> None:
        """Capture every size; `on_progress` takes (done, total). `dp_size` ranks step together."""
        self._attention.graph_tasks = self._backend.tasks
        try:
            for done, size in enumerate(sorted(sizes, reverse=True)):
                on_progress(done, len(sizes))
                for lora in (True, False) if builder.takes_lora else (False,):
                    model_input = builder.graph_input(size, dp_size, lora)
                    self._attention.prepare(model_input.attention)
                    self._graphs[size, lora] = self._backend.capture(self._run_on(model_input))
        finally:
            self._attention.graph_tasks = None
        self.sizes = sorted({size for size, _ in self._graphs})
        on_progress(len(sizes), len(sizes))

    def _run_on(self, model_input: ForwardInput) -> Callable[[], torch.Tensor]:
        return lambda: self._model(model_input)

    def bucket(self, batch_size: int) -> int | None:
        """The size to pad to, or None if the batch is larger than all."""
        i = bisect.bisect_left(self.sizes, batch_size)
        return self.sizes[i] if i < len(self.sizes) else None

    def run(self, model_input: ForwardInput) -> torch.Tensor:
        """[graph size, hidden]; `model_input` was built for a captured size."""
        self._attention.prepare(model_input.attention)
        return self._graphs[model_input.token_ids.shape[0], model_input.lora_slots is not None].replay()
