"""Steps with prompts through graphs that are cut at every attention, one row of graphs for each number of tokens.

What lies between two attentions is captured: its shapes follow from the number of tokens, which is padded to the next
size. Attention runs eagerly in between, over the step's own tokens, so rows, lengths and block tables may be anything
and no padded token reaches the cache. Its result is copied into a buffer that all layers and sizes share, because the
piece behind it reads it before the next attention writes. Rows of that buffer past the step's tokens hold what earlier
steps left, which only padded tokens see.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from xllm_models.attention.base import PagedBackend
from xllm_models.forward_input import ForwardInput
from xllm_models.layers.attention_cut import AttentionLayer
from xllm_platform.base import Cut, Graph, GraphBackend

from xllm_npu.execution.input_builder import InputBuilder


class PiecewiseRunner:
    def __init__(self, backend: GraphBackend, model: Any, attention: PagedBackend, max_tokens: int) -> None:
        """`max_tokens`: of the largest size that will be captured. `model` has `cut_attention`."""
        self._backend, self._model, self._attention = backend, model, attention
        self._max_tokens = max_tokens
        self._graphs: dict[tuple[int, bool], Graph] = {}  # by size, and whether tokens may have adapters
        self._attended: torch.Tensor | None = None  # [max_tokens, what attention gives for a token]
        self._num_tokens = 0  # of the step that runs
        self.sizes: list[int] = []

    def capture(self, sizes: list[int], builder: InputBuilder, on_progress: Callable[[int, int], None],
                dp_size: int = 1) -> None:
        """Capture every size, the largest first; `on_progress` takes (done, total)."""
        try:
            for done, size in enumerate(sorted(sizes, reverse=True)):
                on_progress(done, len(sizes))
                for lora in (True, False) if builder.takes_lora else (False,):
                    run = self._run_on(builder.pieces_input(size, dp_size, lora))
                    self._graphs[size, lora] = self._backend.capture_pieces(run)
        finally:
            self._model.cut_attention(None)
        self.sizes = sorted({size for size, _ in self._graphs})
        on_progress(len(sizes), len(sizes))

    def bucket(self, num_tokens: int) -> int | None:
        """The size to pad to, or None if the step is larger than all."""
        i = bisect.bisect_left(self.sizes, num_tokens)
        return self.sizes[i] if i < len(self.sizes) else None

    def run(self, model_input: ForwardInput) -> torch.Tensor:
        """[size, hidden], of which the step's tokens come first; `model_input` was padded to a captured size."""
        self._attention.prepare(model_input.attention)
        self._num_tokens = model_input.attention.slot_mapping.shape[0]
        return self._graphs[model_input.token_ids.shape[0], model_input.lora_slots is not None].replay()

    def _run_on(self, model_input: ForwardInput) -> Callable[[Cut], torch.Tensor]:
        def run(cut: Cut) -> torch.Tensor:
            self._model.cut_attention(lambda layer, *rows: self._cut(cut, layer, rows))
            return self._model(model_input)

        return run

    def _cut(self, cut: Cut, layer: AttentionLayer, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where a layer would attend, in a capture: [size, width] that replays fill."""
        out = self._buffer(layer.attended_width, rows[0])

        def attend(tensors: Sequence[torch.Tensor]) -> None:
            count = self._num_tokens
            out[:count].copy_(layer.attend(*(tensor[:count] for tensor in tensors)))

        cut(attend, rows)
        return out[: rows[0].shape[0]]

    def _buffer(self, width: int, like: torch.Tensor) -> torch.Tensor:
        """Made in the run before the first capture, so it is no graph's memory."""
        if self._attended is None:
            self._attended = like.new_zeros(self._max_tokens, width)
        assert self._attended.shape[1] == width, "all layers' attentions have as many heads"
        return self._attended
