"""All graphs of a worker: those of decode steps, and those of steps with prompts if they are wanted.

They share one memory pool. Prompts have the largest steps, so they are captured first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from xllm_models.attention.base import PagedBackend
from xllm_platform.base import Platform

from xllm_npu.execution.graph_plan import GraphSizes
from xllm_npu.execution.graph_runner import GraphRunner
from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.piecewise_runner import PiecewiseRunner


class CapturedGraphs:
    def __init__(
        self, platform: Platform, model: Any, attention: PagedBackend, builder: InputBuilder, dp_size: int,
        most_tokens: int,
    ) -> None:
        """`most_tokens` of a captured step with prompts; 0: none is. `dp_size` ranks step together."""
        backend = platform.graph_backend()
        self._platform, self._builder, self._dp_size = platform, builder, dp_size
        self.decode = GraphRunner(backend, model, attention)
        self.prefill = PiecewiseRunner(backend, model, attention, most_tokens) if most_tokens else None

    def capture(self, sizes: GraphSizes, on_progress: Callable[[int, int], None]) -> None:
        """Capture these besides what is captured already; `on_progress` takes (done, total)."""
        prompts, total = len(sizes.prefill), len(sizes.prefill) + len(sizes.decode)
        with torch.inference_mode(), self._platform.inference_context():
            if self.prefill is not None and sizes.prefill:
                self.prefill.capture(sizes.prefill, self._builder, lambda done, _: on_progress(done, total),
                                     self._dp_size)
            if sizes.decode:
                self.decode.capture(sizes.decode, self._builder, lambda done, _: on_progress(prompts + done, total),
                                    self._dp_size)
