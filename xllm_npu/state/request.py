"""One inference request as the engine sees it, and its sequences.

A request is admitted with one sequence that computes the prompt; when the first token is due the others fork from it.
Knows token ids only. What a sequence owns while it runs (blocks, counters) lives in its `BatchTable` row; what it must
remember while it waits (its tokens) lives here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xllm_npu.state.messages import AddRequest, Logprobs, sequence_key

Tokens = npt.NDArray[np.int32]
NO_ROW = -1


class SequenceState(enum.Enum):
    WAITING = "waiting"  # no row, no blocks
    RUNNING = "running"  # has a row
    FINISHED = "finished"  # its row, if any, waits for a step in flight


@dataclass(slots=True, eq=False)
class Sequence:
    """One evolving token sequence."""

    request: Request
    index: int
    tokens: Tokens  # known tokens while waiting; the row's columns have them while running
    num_prompt: int
    max_total: int
    stop_ids: list[int]
    extra_stop_ids: frozenset[int]  # of stop_ids, those that do not fit into the table's columns
    state: SequenceState = SequenceState.WAITING
    row: int = NO_ROW
    preempt_requested: bool = False  # leaves its row once its last step has ended
    fork_on_sample: bool = False  # the siblings wait for its first sample
    chain: list[bytes] = field(default_factory=list)  # hashes of its full blocks
    root: bytes = b""  # that the chain starts from; see WaitingQueue.push
    num_indexed: int = 0  # blocks of the row that went through the prefix index
    order: tuple[int, float, int, int] = (0, 0.0, 0, 0)  # offline, rank, arrival, index: smaller runs first

    @property
    def key(self) -> int:
        return sequence_key(self.request.request_id, self.index)

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order


@dataclass(slots=True, eq=False)
class Request:
    message: AddRequest
    prompt: Tokens
    arrival: int  # a counter: order of arrival
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    enqueue_time: float = 0.0  # monotonic
    first_schedule_time: float = 0.0  # monotonic; 0 until scheduled
    num_cached_tokens: int = 0
    announced: bool = False  # its PromptInfo has been sent
    prompt_logprobs: list[Logprobs | None] | None = None

    @property
    def request_id(self) -> int:
        return self.message.request_id

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.message.params.prompt_logprobs is not None
