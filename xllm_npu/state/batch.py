"""The work of one step: which rows run, how many tokens of each, which positions are sampled.

Made by the scheduler, read by the engine (which adds token ids and block tables from the `BatchTable`) and by the
scheduler again when the step's result arrives. A `BatchGroup` holds one batch for each data-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from xllm_npu.state.batch_table import BatchTable
from xllm_npu.state.messages import Logprobs
from xllm_npu.state.sampling_params import SamplingParams

I32 = npt.NDArray[np.int32]


class RowAdmission(msgspec.Struct, array_like=True, kw_only=True):
    """What the worker must know to sample for a row; sent with the row's first step after each admission."""

    row: int
    sequence_index: int
    params: SamplingParams
    stop_ids: list[int]  # suppressed until min_tokens; EOS included
    prompt: bytes = b""  # int32; only if a penalty, bad word or grammar looks at what was generated
    output: bytes = b""  # int32; tokens generated before a preemption, likewise
    second_rotation: bool = False  # the sequence is past SchedulerOptions.rotary_switch
    lora_slot: int = -1  # where its adapter is, for as long as it has the row; -1: it has none


@dataclass(slots=True, eq=False)
class Batch:
    """B rows, those with one decode token first."""

    step_id: int
    rows: I32  # [B] distinct
    start: I32  # [B] first position computed in this step
    num_new: I32  # [B] tokens computed in this step
    num_decodes: int  # rows[:num_decodes] each decode one token
    sample_source: I32  # [S] index into rows whose last position is sampled
    sample_rows: I32  # [S] row that receives the token; differs from the source's for a fork
    sample_output: I32  # [S] tokens the receiving sequence has generated before this one
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks, copied in order before the forward pass
    admitted: list[RowAdmission] = field(default_factory=list)
    released: list[int] = field(default_factory=list)  # rows whose worker-side state ends before this step
    lora_loads: list[tuple[int, int]] = field(default_factory=list)  # (slot, adapter), in order, before the step
    # (index into rows, k, the prompt token after this step's positions or -1)
    prompt_logprobs: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())


@dataclass(slots=True, eq=False)
class BatchGroup:
    """One step over the data-parallel ranks. `table` is the rows that `batches` speak of."""

    batches: list[Batch]
    tables: list[BatchTable]
    # Where ranks of different processes step together, what they agreed on; see StepInput.
    dp_tokens: list[int] = field(default_factory=list)
    dp_all_decode: bool = False


def empty_step() -> BatchGroup:
    """A step for a rank without work: one token that decodes on the dummy block, and nothing is sampled.

    Its result has step_id -1 and belongs to nobody.
    """

    def i32(*values: int) -> I32:
        return np.array(values, np.int32)

    table = BatchTable(num_rows=1, max_tokens=1, max_blocks=1)
    table.num_tokens[0] = 1
    batch = Batch(step_id=-1, rows=i32(0), start=i32(0), num_new=i32(1), num_decodes=1, sample_source=i32(),
                  sample_rows=i32(), sample_output=i32())
    return BatchGroup([batch], [table])


class StepResult(msgspec.Struct, array_like=True, kw_only=True):
    """What one worker step produced; arrays as raw bytes, so that a process can sit between."""

    step_id: int
    tokens: bytes = b""  # int32 [S], in the order of Batch.sample_rows
    vectors: bytes = b""  # float32 [S, width] instead of tokens, where outputs are pooled
    logprobs: dict[int, Logprobs] = msgspec.field(default_factory=dict)  # index into sample_rows
    prompt_logprobs: dict[int, list[Logprobs]] = msgspec.field(default_factory=dict)  # row -> one a position
    failed: list[int] = msgspec.field(default_factory=list)  # indices into sample_rows without a usable distribution
    failures: dict[int, str] = msgspec.field(default_factory=dict)  # of those, what to say instead of that
    seconds: float = 0.0
    graph_miss: bool = False  # a decode step above the largest graph
    prefill_graph_miss: bool = False  # one with prompts above the largest pieces

    def token_array(self) -> I32:
        return np.frombuffer(self.tokens, np.int32)
