"""How a forward pass runs: as a graph if the step is a decode that fits one, in pieces if prompts are captured and it
fits those, else eagerly.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from xllm_models.attention.base import PagedBackend
from xllm_models.forward_input import ForwardInput

from xllm_npu.execution.graph_runner import GraphRunner
from xllm_npu.execution.piecewise_runner import PiecewiseRunner
from xllm_npu.execution.step_message import StepInput

log = logging.getLogger(__name__)


class EagerRunner:
    def __init__(self, model: torch.nn.Module, attention: PagedBackend) -> None:
        self._model = model
        self._attention = attention

    def run(self, model_input: ForwardInput) -> torch.Tensor:
        """[T, hidden]"""
        self._attention.prepare(model_input.attention)
        return self._model(model_input)


@dataclass(slots=True, frozen=True)
class StepPlan:
    """What to build a step's input for; neither: eagerly."""

    graph_size: int = 0  # rows of the decode graph
    padded_tokens: int = 0  # tokens of the pieces
    lora: bool = False  # with adapters


@dataclass(slots=True)
class GraphMisses:
    """Steps that were too large for what was captured for their kind."""

    decode: int = 0
    prefill: int = 0


class Executor:
    """Picks the runner for each step."""

    def __init__(self, eager: EagerRunner, graph: GraphRunner | None, pieces: PiecewiseRunner | None = None) -> None:
        self._eager, self._graph, self._pieces = eager, graph, pieces
        self._warned = False
        self.misses = GraphMisses()

    def plan(self, step: StepInput, lora: bool = False) -> StepPlan:
        """Ranks that step together come to the same sizes. `lora`: some row has an adapter."""
        num_rows, num_tokens = len(step.rows) // 4, len(step.tokens) // 4
        if step.num_decodes == num_rows and (step.dp_all_decode or not step.dp_tokens):
            return StepPlan(graph_size=self._graph_size(max(step.dp_tokens, default=num_rows)), lora=lora)
        return StepPlan(padded_tokens=self._padded_tokens(max(step.dp_tokens, default=num_tokens)), lora=lora)

    def run(self, model_input: ForwardInput, plan: StepPlan) -> torch.Tensor:
        """The step's rows come first in what is returned."""
        if plan.graph_size:
            assert self._graph is not None
            return self._graph.run(model_input)
        if plan.padded_tokens:
            assert self._pieces is not None
            return self._pieces.run(model_input)
        return self._eager.run(model_input)

    def _graph_size(self, num_rows: int) -> int:
        if self._graph is None:
            return 0
        size = self._graph.bucket(num_rows)
        if size is None:
            self.misses.decode += 1
            if not self._warned:
                self._warned = True
                log.warning("decode batches above %d run without a graph and slower; add to graph_batch_sizes",
                            self._graph.sizes[-1])
        return size or 0

    def _padded_tokens(self, num_tokens: int) -> int:
        if self._pieces is None:
            return 0
        size = self._pieces.bucket(num_tokens)
        self.misses.prefill += size is None
        return size or 0
