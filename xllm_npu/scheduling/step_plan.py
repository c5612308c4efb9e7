"""The step under construction: what the loop has taken so far, turned into a `Batch` at the end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xllm_npu.scheduling.budget import StepBudget
from xllm_npu.state.batch import Batch, RowAdmission
from xllm_npu.state.batch_table import BatchTable
from xllm_npu.state.request import Sequence

I32 = npt.NDArray[np.int32]
NO_ROWS: I32 = np.zeros(0, np.int32)


class StepPlan:
    def __init__(self, step_id: int, budget: StepBudget) -> None:
        self.step_id = step_id
        self.budget = budget
        self.decode_rows: list[I32] = []
        self.decode_start: list[I32] = []
        self.prefill: dict[Sequence, tuple[int, int]] = {}  # start, tokens
        self.copies: list[tuple[int, int]] = []
        self.admitted: list[RowAdmission] = []
        self.forks: list[tuple[Sequence, Sequence]] = []  # source, sibling
        self.gave_way = False  # decodes left their rows to be computed anew: planning again may find work

    @property
    def has_prefill(self) -> bool:
        return bool(self.prefill)

    @property
    def empty(self) -> bool:
        return not self.prefill and not self.decode_rows

    def add_decodes(self, rows: I32, start: I32) -> None:
        self.decode_rows.append(rows)
        self.decode_start.append(start)

    def build(self, table: BatchTable, released: list[int], lora_loads: list[tuple[int, int]]) -> Batch:
        """The batch, decodes first; prompts that end in this step are sampled, for their forks too."""
        rows = _join(self.decode_rows)
        start = _join(self.decode_start)
        decodes = rows.size
        num_new = np.ones(decodes, np.int32)
        source = np.arange(decodes, dtype=np.int32)
        receiver = rows
        output = start + 1 - table.num_prompt[rows]
        prompt_logprobs: list[tuple[int, int, int]] = []
        if self.prefill:
            p_rows, p_start, p_new, p_source, p_receiver = self._prefill_columns(decodes, table, prompt_logprobs)
            rows = np.concatenate((rows, p_rows))
            start = np.concatenate((start, p_start))
            num_new = np.concatenate((num_new, p_new))
            source = np.concatenate((source, p_source))
            receiver = np.concatenate((receiver, p_receiver))
            p_output = table.prefill_target[p_receiver] - table.num_prompt[p_receiver]
            output = np.concatenate((output, p_output))
        return Batch(
            step_id=self.step_id, rows=rows, start=start, num_new=num_new, num_decodes=decodes,
            sample_source=source, sample_rows=receiver, sample_output=output, copies=self.copies,
            admitted=self.admitted, released=released, prompt_logprobs=prompt_logprobs, lora_loads=lora_loads,
        )

    def _prefill_columns(
        self, offset: int, table: BatchTable, prompt_logprobs: list[tuple[int, int, int]]
    ) -> tuple[I32, I32, I32, I32, I32]:
        siblings: dict[Sequence, list[Sequence]] = {}
        for source, sibling in self.forks:
            siblings.setdefault(source, []).append(sibling)
        rows, start, new, samples, receivers = [], [], [], [], []
        for i, (sequence, (first, count)) in enumerate(self.prefill.items(), offset):
            rows.append(sequence.row)
            start.append(first)
            new.append(count)
            if first + count == table.prefill_target[sequence.row]:
                for receiver in [sequence, *siblings.get(sequence, [])]:
                    samples.append(i)
                    receivers.append(receiver.row)
            wanted = sequence.request.message.params.prompt_logprobs
            if wanted is not None and sequence.index == 0:
                end = first + count
                following = int(table.token_ids[sequence.row, end]) if end < sequence.num_prompt else -1
                prompt_logprobs.append((i, wanted, following))
        return _column(rows), _column(start), _column(new), _column(samples), _column(receivers)


def _column(values: list[int]) -> I32:
    return np.array(values, np.int32)


def _join(parts: list[I32]) -> I32:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_ROWS
