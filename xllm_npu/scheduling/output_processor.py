"""Results of a step into the table and out to clients, a column at a time.

Applies the stopping rules (vectorised; `StoppingChecker` is the plain form), ends sequences, and collects what clients
must hear. Tokens of sequences that ended while the step was in flight are dropped here.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from xllm_npu.scheduling.running_set import RunningSet
from xllm_npu.state.batch import Batch, StepResult
from xllm_npu.state.batch_table import DECODE, ENDED
from xllm_npu.state.messages import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    EngineStats,
    Finished,
    Logprobs,
    PromptInfo,
    StepOutputs,
)
from xllm_npu.state.request import Request, Sequence, SequenceState

I32 = npt.NDArray[np.int32]
NOT_A_NUMBER = "The model's output for this request is not a number; the request was ended."


class OutputProcessor:
    def __init__(self, running: RunningSet, requests: dict[int, Request], stats: EngineStats) -> None:
        self.running = running
        self.requests = requests
        self.stats = stats
        self._in_batch_sharing = running.options.enable_in_batch_prefix_cache

    def process(self, batch: Batch, result: StepResult) -> StepOutputs:
        outputs = StepOutputs()
        if batch.num_decodes < batch.rows.size:
            self._after_prefill(batch, result, outputs)
        if batch.sample_rows.size and self.running.options.pooling:
            self._after_pooling(batch, result, outputs)
        elif batch.sample_rows.size:
            self._after_sampling(batch, result, outputs)
        return outputs

    def _after_sampling(self, batch: Batch, result: StepResult, outputs: StepOutputs) -> None:
        table = self.running.table
        rows, tokens = batch.sample_rows, result.token_array()
        phase = table.phase[rows]
        live = phase == DECODE
        if not live.all():
            live |= self._preempted(rows, phase)
        if result.failed:
            live &= self._fail(rows, result, outputs)
        every = bool(live.all())
        kept = np.arange(rows.size) if every else np.flatnonzero(live)
        if not every:
            rows, tokens = rows[kept], tokens[kept]
        position = table.num_tokens[rows]
        table.token_ids[rows, position] = tokens
        total = position + 1
        table.num_tokens[rows] = total
        stopped = (tokens[:, None] == table.stop_ids[rows]).any(axis=1)
        if self.running.long_stop_rows:
            self._add_extra_stops(rows, tokens, stopped)
        ended = stopped | (total >= table.max_total[rows])
        keys = table.key[rows]
        if result.logprobs:
            self._attach_logprobs(kept, keys, result.logprobs, outputs)
        if ended.any():
            for i in np.flatnonzero(ended).tolist():
                self._finish_row(int(rows[i]), int(tokens[i]), bool(stopped[i]), outputs)
        self.stats.generation_tokens_total += rows.size
        outputs.keys = keys.tobytes()
        outputs.tokens = tokens.astype(np.int32, copy=False).tobytes()

    def _after_pooling(self, batch: Batch, result: StepResult, outputs: StepOutputs) -> None:
        """Prompts whose last token has been computed end here, each with its vector."""
        table, rows = self.running.table, batch.sample_rows
        live = (table.phase[rows] == DECODE) | self._preempted(rows, table.phase[rows])
        if result.failed:
            live &= self._fail(rows, result, outputs)
        vectors = np.frombuffer(result.vectors, np.float32).reshape(rows.size, -1)
        for i in np.flatnonzero(live).tolist():
            sequence = self.running.by_row[rows[i]]
            assert sequence is not None
            outputs.vectors[sequence.key] = vectors[i].tobytes()
            outputs.finished.append(Finished(sequence.key, FINISH_STOP))
            self.finish(sequence)

    def _preempted(self, rows: I32, phase: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
        """Rows that gave way while the step was in flight: they leave, but this token is theirs if they live."""
        live = np.zeros(rows.size, bool)
        for i in np.flatnonzero(phase == ENDED).tolist():
            sequence = self.running.by_row[rows[i]]
            live[i] = (sequence is not None and sequence.preempt_requested
                       and sequence.state is not SequenceState.FINISHED)
        return live

    def _fail(self, rows: I32, result: StepResult, outputs: StepOutputs) -> npt.NDArray[np.bool_]:
        keep = np.ones(rows.size, bool)
        for i in result.failed:
            keep[i] = False
            sequence = self.running.by_row[rows[i]]
            if sequence is not None and sequence.state is not SequenceState.FINISHED:
                message = result.failures.get(i, NOT_A_NUMBER)
                outputs.finished.append(Finished(sequence.key, FINISH_ERROR, message=message))
                self.finish(sequence)
        return keep

    def _finish_row(self, row: int, token: int, stopped: bool, outputs: StepOutputs) -> None:
        sequence = self.running.by_row[row]
        assert sequence is not None
        reason = FINISH_STOP if stopped else FINISH_LENGTH
        outputs.finished.append(Finished(sequence.key, reason, token if stopped else -1))
        self.finish(sequence)

    def _add_extra_stops(self, rows: I32, tokens: I32, stopped: npt.NDArray[np.bool_]) -> None:
        """Sequences with more stop ids than the table has columns: mark those that one of the others ends."""
        for row in self.running.long_stop_rows.intersection(rows.tolist()):
            sequence, i = self.running.by_row[row], int(np.flatnonzero(rows == row)[0])
            if sequence is not None and int(tokens[i]) in sequence.extra_stop_ids:
                stopped[i] = True

    def _attach_logprobs(
        self, kept: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], logprobs: dict[int, Logprobs],
        outputs: StepOutputs,
    ) -> None:
        for i, key in zip(kept.tolist(), keys.tolist()):
            entry = logprobs.get(i)
            if entry is not None:
                outputs.logprobs[key] = entry

    def _after_prefill(self, batch: Batch, result: StepResult, outputs: StepOutputs) -> None:
        """Prompts that were (partly) computed: index their blocks, collect their logprobs, announce the request."""
        now = time.monotonic()
        table = self.running.table
        sampled = set(batch.sample_source.tolist())
        for i in range(batch.num_decodes, batch.rows.size):
            sequence = self.running.by_row[batch.rows[i]]
            if sequence is None or sequence.state is SequenceState.FINISHED:
                continue
            end = int(batch.start[i] + batch.num_new[i])
            if not self._in_batch_sharing and self.running.options.enable_prefix_cache:
                self.running.index_prompt_blocks(sequence, min(end, int(table.num_tokens[sequence.row])))
            request = sequence.request
            rows = result.prompt_logprobs.get(int(batch.rows[i]))
            if rows and request.prompt_logprobs is not None:
                first = int(batch.start[i]) + 1
                last = min(first + len(rows), len(request.prompt_logprobs))
                request.prompt_logprobs[first:last] = rows[: last - first]
            if i in sampled and not request.announced:
                request.announced = True
                outputs.prompts.append(PromptInfo(
                    request.request_id, request.num_cached_tokens,
                    request.first_schedule_time - request.enqueue_time, now - request.first_schedule_time,
                    request.prompt_logprobs,
                ))

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, whatever the reason; its row goes when its last step has ended."""
        was_running = sequence.state is SequenceState.RUNNING and not sequence.preempt_requested
        sequence.state = SequenceState.FINISHED
        if was_running:
            self.running.leave(sequence)
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self.requests.pop(request.request_id, None)
