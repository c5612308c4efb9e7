"""One engine step as the message a worker receives: `Batch` plus the token ids and block tables it needs.

Complete in itself: nothing in it is shared with the sender, so a process or a machine can sit between. Arrays are raw
bytes of int32. A token id of PLACEHOLDER stands for the token that the worker itself sampled last for that row.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import numpy.typing as npt

from xllm_npu.state.batch import Batch, RowAdmission
from xllm_npu.state.batch_table import BatchTable

I32 = npt.NDArray[np.int32]
PLACEHOLDER = -1


class StepInput(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """B rows (`num_decodes` of them decode one token and come first), T tokens, S samples, W block table columns."""

    step_id: int
    num_decodes: int
    rows: bytes  # [B]
    start: bytes  # [B] first position of the step
    num_new: bytes  # [B] tokens of the step
    tokens: bytes  # [T]
    block_table: bytes  # [B, W]
    table_width: int  # W
    sample_source: bytes  # [S] index into rows
    sample_rows: bytes  # [S]
    sample_output: bytes  # [S] tokens the sequence has generated before this one
    copies: list[tuple[int, int]] = msgspec.field(default_factory=list)
    admitted: list[RowAdmission] = msgspec.field(default_factory=list)
    released: list[int] = msgspec.field(default_factory=list)
    prompt_logprobs: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    lora_loads: list[tuple[int, int]] = msgspec.field(default_factory=list)  # (slot, adapter), before the step
    # Where data-parallel ranks step together: tokens of each rank in this step, and whether all of them only decode.
    dp_tokens: list[int] = msgspec.field(default_factory=list)
    dp_all_decode: bool = False

    def array(self, name: str) -> I32:
        return np.frombuffer(getattr(self, name), np.int32)

    def without_grammars(self) -> StepInput:
        """For ranks that do not sample: grammars may be large."""
        if all(a.params.grammar is None for a in self.admitted):
            return self
        plain = [msgspec.structs.replace(a, params=dataclasses.replace(a.params, grammar=None)) for a in self.admitted]
        return msgspec.structs.replace(self, admitted=plain)


def build_step_input(batch: Batch, table: BatchTable, block_size: int) -> StepInput:
    """Copy what the step needs out of the table."""
    rows, decodes = batch.rows, batch.num_decodes
    end = batch.start + batch.num_new
    width = -(-int(end.max()) // block_size)
    d_rows, position = rows[:decodes], batch.start[:decodes]
    known = position < table.num_tokens[d_rows]
    tokens = np.where(known, table.token_ids[d_rows, position], np.int32(PLACEHOLDER))
    if decodes < rows.size:
        chunks = [tokens]
        for row, begin, stop in zip(rows[decodes:].tolist(), batch.start[decodes:].tolist(), end[decodes:].tolist()):
            chunks.append(table.token_ids[row, begin:stop])
        tokens = np.concatenate(chunks)
    return StepInput(
        step_id=batch.step_id, num_decodes=decodes, rows=rows.tobytes(), start=batch.start.tobytes(),
        num_new=batch.num_new.tobytes(), tokens=tokens.tobytes(),
        block_table=table.block_table[rows, :width].tobytes(), table_width=width,
        sample_source=batch.sample_source.tobytes(), sample_rows=batch.sample_rows.tobytes(),
        sample_output=batch.sample_output.tobytes(), copies=batch.copies, admitted=batch.admitted,
        released=batch.released, prompt_logprobs=batch.prompt_logprobs, lora_loads=batch.lora_loads,
    )
