"""How a forward pass runs: eagerly, or as a graph when the step is a decode that fits one."""

from __future__ import annotations

import logging

import torch
from xllm_models.attention.base import PagedBackend
from xllm_models.forward_input import ForwardInput

from xllm_npu.execution.graph_runner import GraphRunner
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


class Executor:
    """Picks the runner for each step."""

    def __init__(self, eager: EagerRunner, graph: GraphRunner | None) -> None:
        self._eager = eager
        self._graph = graph
        self._warned = False
        self.graph_misses = 0  # decode steps larger than every graph

    def graph_size(self, step: StepInput, num_rows: int) -> int:
        """The size to build the step's input for; 0 means eager."""
        if self._graph is None or step.num_decodes < num_rows or (step.dp_tokens and not step.dp_all_decode):
            return 0
        size = self._graph.bucket(max(step.dp_tokens, default=num_rows))
        if size is None:
            self.graph_misses += 1
            if not self._warned:
                self._warned = True
                log.warning("decode batches above %d run without a graph and slower; add to graph_batch_sizes",
                            self._graph.sizes[-1])
        return size or 0

    def run(self, model_input: ForwardInput, as_graph: bool) -> torch.Tensor:
        if as_graph:
            assert self._graph is not None
            return self._graph.run(model_input)
        return self._eager.run(model_input)
