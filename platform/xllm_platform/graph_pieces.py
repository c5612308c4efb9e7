"""A computation as a row of captured graphs, with calls between them that run anew at every replay.

All graphs of a row are captured into one memory pool, one after the other. What one leaves for the next is still held
by the computation while that is captured, so nobody else gets its memory. What the calls in between are given owns
nothing: afterwards the pool may use that memory further down the row, and in other rows. Replays are ordered on one
stream, so it is read before it is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xllm_platform.base import Cut, Graph

if TYPE_CHECKING:
    import torch

Alias = Callable[["torch.Tensor"], "torch.Tensor"]  # a tensor over the same memory that does not keep it
Call = Callable[[Sequence["torch.Tensor"]], None]


@dataclass(slots=True, frozen=True)
class Between:
    """What runs between two graphs."""

    call: Call
    tensors: Sequence[torch.Tensor]


class PieceRow(Graph):
    """One graph more than there are calls. Replay is asynchronous, ordered on the current stream."""

    def __init__(self, graphs: Sequence[Any], calls: Sequence[Between], output: torch.Tensor) -> None:
        self._graphs, self._calls, self._output = graphs, calls, output

    def replay(self) -> torch.Tensor:
        for graph, between in zip(self._graphs, self._calls):
            graph.replay()
            between.call(between.tensors)
        self._graphs[-1].replay()
        return self._output


class PieceCapture:
    """One row while it is captured, on the current stream. `new_graph` makes graphs of torch's device module."""

    def __init__(self, new_graph: Callable[[], Any], pool: Any, alias: Alias) -> None:
        self._new_graph, self._pool, self._alias = new_graph, pool, alias
        self._graphs: list[Any] = []
        self._calls: list[Between] = []

    def capture(self, run: Callable[[Cut], torch.Tensor]) -> PieceRow:
        """Raises what torch raises where something cannot be captured."""
        self._begin()
        try:
            output = self._alias(run(self._cut))
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to tell
                self._graphs[-1].capture_end()
            raise
        self._graphs[-1].capture_end()
        return PieceRow(self._graphs, self._calls, output)

    def _begin(self) -> None:
        graph = self._new_graph()
        graph.capture_begin(pool=self._pool)
        self._graphs.append(graph)

    def _cut(self, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        self._graphs[-1].capture_end()
        self._calls.append(Between(call, [self._alias(tensor) for tensor in tensors]))
        self._begin()
