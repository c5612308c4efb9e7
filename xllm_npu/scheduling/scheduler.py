"""What runs next: one continuous-batching loop that serves the segments a policy yields.

    batches = scheduler.schedule()
    outputs = engine.execute(batches)
    scheduler.process(outputs)

`schedule` may run again before the step before it has been processed (overlapped scheduling): counters advance when
work is scheduled, tokens become known when results are processed, and rows leave when their last step has ended.
Preemption is by recompute: the victim's blocks go back and it waits with the tokens it knows.
Knows token ids only; no device, no text, no clock but the one it is given.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import numpy.typing as npt

from xllm_npu.scheduling.budget import StepBudget
from xllm_npu.scheduling.latency_model import LatencyModel
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.output_processor import OutputProcessor
from xllm_npu.scheduling.policy import Kind, Segment, get_policy
from xllm_npu.scheduling.running_set import RunningSet
from xllm_npu.scheduling.step_plan import StepPlan
from xllm_npu.scheduling.strategy import get_strategy
from xllm_npu.scheduling.waiting_queue import WaitingQueue
from xllm_npu.state.batch import Batch, BatchGroup, RowAdmission, StepResult
from xllm_npu.state.batch_table import DECODE, STOP_COLUMNS
from xllm_npu.state.messages import (
    FINISH_ERROR,
    SEQUENCES_PER_REQUEST,
    AddRequest,
    EngineStats,
    Finished,
    StepOutputs,
    sequence_key,
)
from xllm_npu.state.request import NO_ROW, Request, Sequence, SequenceState
from xllm_npu.state.stopping import max_total_tokens, stop_token_ids

I32 = npt.NDArray[np.int32]


class Scheduler:
    """The scheduler of one engine (one data-parallel rank)."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.policy = get_policy(options.policy)
        self.running = RunningSet(options)
        self.waiting = WaitingQueue(options.starve_seconds if options.enable_starve_prevent else None)
        self.requests: dict[int, Request] = {}
        self.stats = EngineStats()
        self._strategy = get_strategy(options.priority_strategy)
        self._outputs = OutputProcessor(self.running, self.requests, self.stats)
        self._latency = LatencyModel() if options.latency_aware else None
        self._in_flight: deque[tuple[Batch, tuple[float, ...]]] = deque()
        self._pending_finished: list[Finished] = []
        self._next_step = 0
        self._arrivals = 0

    # Requests in

    def add(self, message: AddRequest) -> None:
        """Queue a request. One that could never fit ends at once with an error in the next outputs."""
        params = message.params
        prompt = message.prompt_token_ids
        self._arrivals += 1
        root = self.running.blocks.prefix.root(message.cache_salt)
        request = Request(message, prompt, root, self._arrivals, enqueue_time=time.monotonic())
        max_total = max_total_tokens(params, len(prompt), self.options.max_model_len)
        stop_ids = stop_token_ids(params, self.options.eos_token_ids)
        offline, rank = int(message.offline), self._strategy(message)
        for index in range(params.num_sequences):
            request.sequences.append(Sequence(
                request, index, prompt, len(prompt), max_total, stop_ids, frozenset(stop_ids[STOP_COLUMNS:]),
                order=(offline, rank, request.arrival, index),
            ))
        reason = self._impossible(request, max_total)
        if reason:
            self.refuse(message, reason)
            return
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(prompt)
        request.num_unfinished = len(request.sequences)
        self.requests[request.request_id] = request
        lead = request.sequences[0]
        lead.fork_on_sample = len(request.sequences) > 1
        self._enqueue(lead)

    def refuse(self, message: AddRequest, reason: str) -> None:
        """End a request that was never queued, with an error in the next outputs."""
        keys = [sequence_key(message.request_id, i) for i in range(message.params.num_sequences)]
        self._pending_finished += [Finished(key, FINISH_ERROR, message=reason) for key in keys]

    def _impossible(self, request: Request, max_total: int) -> str | None:
        """Why this request can never be served, or None."""
        o, n = self.options, len(request.prompt)
        need, have = self.running.blocks.blocks_for(max_total), o.num_blocks - 1
        if n == 0 or n >= o.max_model_len:
            return f"The prompt has {n} tokens; this server takes 1 to {o.max_model_len - 1}."
        if not o.enable_chunked_prefill and n > o.max_tokens:
            return f"The prompt has {n} tokens; without chunked prefill at most {o.max_tokens} fit into one step."
        if need > have:
            return (f"Prompt and max_tokens come to {max_total} tokens or {need} KV cache blocks; "
                    f"the cache has {have} blocks.")
        if request.request_id in self.requests:
            return "A request with this id is running."
        return None

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        if self.options.enable_prefix_cache:
            request = sequence.request
            self.running.blocks.prefix.extend_chain(
                sequence.chain, request.root, sequence.tokens, len(sequence.tokens))
        self.waiting.push(sequence)

    def abort(self, keys: list[int]) -> None:
        """End sequences now; nothing is reported for them. Unknown keys are ones that ended already."""
        for key in keys:
            request = self.requests.get(key // SEQUENCES_PER_REQUEST)
            index = key % SEQUENCES_PER_REQUEST
            if request is not None and index < len(request.sequences):
                self._end(request.sequences[index])

    def abort_all(self) -> None:
        for request in list(self.requests.values()):
            self.abort([s.key for s in request.sequences])

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.fork_on_sample:
            self._hand_over_lead(sequence)
        self._outputs.finish(sequence)

    def _hand_over_lead(self, lead: Sequence) -> None:
        """The sequence that computes the prompt ends before it forked: the next sibling takes its part."""
        lead.fork_on_sample = False
        rest = [s for s in lead.request.sequences if s is not lead and s.state is not SequenceState.FINISHED]
        if rest:
            rest[0].fork_on_sample = len(rest) > 1
            self._enqueue(rest[0])

    @property
    def has_work(self) -> bool:
        """Something runs, waits, is in flight, or has news to report."""
        return bool(self.requests or self._in_flight or self._pending_finished)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # Schedule

    def schedule(self) -> BatchGroup | None:
        """The next step, or None if nothing can be scheduled before a step in flight has been processed."""
        now = time.monotonic()
        plan = self._plan(now)
        while plan.empty and not self._in_flight and self._relieve():
            plan = self._plan(now)  # blocks were held by sequences that could not go on; one gave way
        if plan.empty:
            return None
        released, self.running.released = self.running.released, []
        batch = plan.build(self.running.table, released)
        batch.scheduled_at = now
        self._in_flight.append((batch, plan.budget.features() if self._latency else ()))
        self._next_step += 1
        return BatchGroup([batch], [self.running.table])

    def _plan(self, now: float) -> StepPlan:
        o = self.options
        budget = StepBudget(o.max_tokens, o.max_seqs)
        if self._latency is not None:
            budget.model = self._latency
            budget.seconds = self.policy.step_seconds(self.running, o.max_ttft_seconds, o.max_tpot_seconds, now)
        plan = StepPlan(self._next_step, budget)
        if o.enable_online_preempt_offline and len(self.waiting) and self.running.num_running:
            self._make_way_for_online(plan, now)
        for segment in self.policy.segments(self.running, plan):
            self._serve(plan, segment, now)
            if budget.exhausted:
                break
        return plan

    def _serve(self, plan: StepPlan, segment: Segment, now: float) -> None:
        if segment.kind is Kind.DECODE:
            rows = self.running.decode_rows()
            if segment.rows is not None:  # some may have given way earlier in this step
                rows = segment.rows[self.running.table.phase[segment.rows] == DECODE]
            if rows.size:
                self._take_decodes(plan, rows)
        elif segment.kind is Kind.CHUNK:
            if self.running.num_prefilling:
                sequences = self.running.prefilling() if segment.sequences is None else segment.sequences
                for sequence in sequences:
                    self._take_chunk(plan, sequence, self._chunk_limit())
        elif segment.kind is Kind.ADMIT:
            if len(self.waiting):
                self._admit(plan, now)
        elif plan.prefill and self.options.max_chunk:
            for sequence in list(plan.prefill):
                self._take_chunk(plan, sequence, plan.budget.tokens)

    # Decodes

    def _take_decodes(self, plan: StepPlan, rows: I32) -> None:
        """One token for each row that still has one to come; rows that get no block wait or give way."""
        table = self.running.table
        start = table.num_computed[rows]
        ready = start < table.max_total[rows] - 1  # else its last token is in flight
        if not ready.all():
            rows = rows[ready]
            start = start[ready]
        limit = min(plan.budget.tokens, plan.budget.seqs)
        if rows.size > limit:
            rows, start = rows[:limit], start[:limit]
        needs = start >= table.num_blocks[rows] * self.options.block_size
        if self.running.maybe_shared:
            needs |= self._shared(rows, start)
        if needs.any():
            rows, start = self._grow_decodes(plan, rows, start, needs)
        if not rows.size:
            return
        table.num_computed[rows] = start + 1
        table.last_step[rows] = plan.step_id
        context = int(start.sum()) if plan.budget.model else 0
        plan.budget.add_decodes(rows.size, context)
        plan.add_decodes(rows, start)

    def _shared(self, rows: I32, start: I32) -> npt.NDArray[np.bool_]:
        """Which rows would write into a block that a fork shares. Those that own theirs are never asked again."""
        running = self.running
        shared = np.zeros(rows.size, bool)
        for i in np.flatnonzero(np.isin(rows, list(running.maybe_shared))).tolist():
            row, position = int(rows[i]), int(start[i])
            shared[i] = running.blocks.is_shared(row, position)
            if not shared[i] and position < running.table.num_blocks[row] * self.options.block_size:
                running.maybe_shared.discard(row)
        return shared

    def _grow_decodes(
        self, plan: StepPlan, rows: I32, start: I32, needs: npt.NDArray[np.bool_]
    ) -> tuple[I32, I32]:
        """One block for every row in `needs`, preempting the last in order while there are not enough."""
        running, blocks, table = self.running, self.running.blocks, self.running.table
        coming = 0
        while int(needs.sum()) > blocks.num_available + coming:
            victim = self._victim(plan)
            if victim is None:
                break
            coming += self._preempt(victim)
            keep = table.phase[rows] == DECODE
            rows, start, needs = rows[keep], start[keep], needs[keep]
        granted = np.ones(rows.size, bool)
        for i in np.flatnonzero(needs).tolist():
            row, position = int(rows[i]), int(start[i])
            if blocks.num_available == 0:
                granted[i] = False  # waits for the blocks that a step in flight still holds
            elif blocks.is_shared(row, position):
                plan.copies.append(blocks.make_writable(row, position))
                running.maybe_shared.discard(row)
            elif position >= table.num_blocks[row] * blocks.block_size:
                blocks.grow(row, position + 1)
                running.maybe_shared.discard(row)
        return rows[granted], start[granted]

    # Preemption

    def _victim(self, plan: StepPlan, offline_only: bool = False) -> Sequence | None:
        """The last prompt in the making, else the last decode in order; never the only one, nor one in this step."""
        table = self.running.table
        if self.running.num_running <= 1:
            return None
        candidates = [s for s in self.running.prefilling() if table.last_step[s.row] != plan.step_id]
        if not candidates:
            rows = self.running.decode_rows()
            rows = rows[table.last_step[rows] != plan.step_id]
            candidates = [s for r in rows[-1:].tolist() if (s := self.running.by_row[r]) is not None]
        candidates = [s for s in candidates if s.order[0] or not offline_only]  # offline ones come last in order
        return candidates[-1] if candidates else None

    def _preempt(self, sequence: Sequence) -> int:
        """Take a sequence off; returns the blocks that will come back when its last step has ended (0: now)."""
        running = self.running
        self.stats.preemptions_total += 1
        sequence.preempt_requested = True
        row = sequence.row
        held = int(running.table.num_blocks[row]) if running.in_flight(row) else 0
        running.leave(sequence)
        if not held:
            self._requeue(sequence)
        return held

    def _requeue(self, sequence: Sequence) -> None:
        sequence.preempt_requested = False
        if sequence.state is SequenceState.FINISHED:
            return
        self._enqueue(sequence)

    def _relieve(self) -> bool:
        """Nothing can go on and nothing is in flight: the last sequence in order gives way, if it is not alone."""
        sequences = self.running.sequences()
        if len(sequences) <= 1:
            return False
        self._preempt(max(sequences))
        return True

    # Prompts

    def _chunk_limit(self) -> int:
        return self.options.max_chunk or self.options.max_tokens

    def _may_chunk(self, tokens: int) -> bool:
        """Without chunked prefill only what a preempted sequence must recompute beyond a whole step is cut."""
        return self.options.enable_chunked_prefill or tokens > self.options.max_tokens

    def _take_chunk(self, plan: StepPlan, sequence: Sequence, limit: int) -> bool:
        """Schedule the next (or, if it is in this step already, a longer) chunk of a running prompt."""
        running, table, budget = self.running, self.running.table, plan.budget
        if sequence.state is not SequenceState.RUNNING or budget.tokens <= 0:
            return False
        row = sequence.row
        first, count = plan.prefill.get(sequence, (int(table.num_computed[row]), 0))
        begin = int(table.num_computed[row])
        wanted = min(int(table.prefill_target[row]) - begin, limit, budget.tokens)
        wanted = budget.largest_chunk(wanted, begin) if wanted > 0 else 0
        whole = int(table.prefill_target[row]) - begin
        if wanted == 0 and plan.empty and not self._in_flight:  # a latency budget that nothing fits must not stop all
            wanted = min(whole, 1 if self._may_chunk(whole) else budget.tokens)
        room = (running.blocks.num_available + int(table.num_blocks[row])) * self.options.block_size - begin
        chunk = min(wanted, room)
        if chunk <= 0 or (chunk < whole and not self._may_chunk(whole)):
            return False
        running.blocks.grow(row, begin + chunk)
        table.num_computed[row] = begin + chunk
        table.last_step[row] = plan.step_id
        if count:
            budget.seqs += 1  # it was counted with its first chunk
        budget.add_prefill(chunk, begin)
        plan.prefill[sequence] = (first, count + chunk)
        if self.options.enable_in_batch_prefix_cache and self.options.enable_prefix_cache:
            running.index_prompt_blocks(sequence, begin + chunk)
        if begin + chunk == table.prefill_target[row]:
            running.start_decode(sequence)
            if sequence.fork_on_sample:
                self._fork(plan, sequence)
        return True

    def _fork(self, plan: StepPlan, lead: Sequence) -> None:
        """The prompt's last position is scheduled: every sibling shares its blocks and samples from it.

        A sibling for which there is no row waits on its own; it will find the prompt in the prefix cache.
        """
        lead.fork_on_sample = False
        for sibling in lead.request.sequences:
            if sibling is lead or sibling.state is SequenceState.FINISHED:
                continue
            sibling.tokens = lead.tokens
            if self.running.table.num_free_rows == 0:
                self._enqueue(sibling)
                continue
            row = self.running.place_fork(sibling, lead)
            self.running.table.last_step[row] = plan.step_id
            plan.forks.append((lead, sibling))
            plan.admitted.append(_admission(sibling))

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Give waiting sequences rows and their first chunk, in order, until one does not fit."""
        running, budget = self.running, plan.budget
        while not budget.exhausted:
            sequence = self.waiting.peek(now)
            if sequence is None or not self._has_room(sequence):
                return
            self.waiting.remove(sequence)
            request = sequence.request
            cached = running.place(sequence)
            running.blocks.prefix.count(len(sequence.tokens), cached)
            admission = _admission(sequence)
            if not self._take_chunk(plan, sequence, self._chunk_limit()):
                running.leave(sequence)  # no budget for it in this step: back to the head of the queue
                self.waiting.push(_as_waiting(sequence))
                return
            if not request.first_schedule_time:
                request.first_schedule_time = now
                request.num_cached_tokens = cached
            plan.admitted.append(admission)

    def _has_room(self, sequence: Sequence) -> bool:
        """The gates: a free row for it and its forks, block usage, and the prompt's whole footprint."""
        running, o = self.running, self.options
        rows_needed = len(sequence.request.sequences) if sequence.fork_on_sample else 1
        return min(rows_needed, o.max_seqs) <= running.table.num_free_rows and self._blocks_fit(sequence)

    def _make_way_for_online(self, plan: StepPlan, now: float) -> None:
        """An online request that does not fit takes the place of the last offline sequence, one in a step."""
        sequence = self.waiting.peek(now)
        if sequence is None or sequence.order[0] or self._has_room(sequence):
            return
        victim = self._victim(plan, offline_only=True)
        if victim is not None:
            self._preempt(victim)

    def _blocks_fit(self, sequence: Sequence) -> bool:
        running, o = self.running, self.options
        blocks = running.blocks
        whole = blocks.blocks_for(len(sequence.tokens))
        hits, unreferenced = (0, 0) if sequence.request.wants_prompt_logprobs else blocks.peek_prefix(
            sequence.chain, sequence.tokens)
        if running.num_running == 0:
            return whole - hits <= blocks.num_available - unreferenced
        if blocks.pool.usage >= o.prefill_gate:
            return False
        promised = sum(blocks.missing_blocks(s.row, int(running.table.prefill_target[s.row]))
                       for s in running.prefilling())
        used = blocks.pool.num_used * self.policy.reserve_factor + promised
        if used + whole - hits > o.num_blocks - 1:
            return False
        chunk_blocks = min(whole - hits, 1) if self._may_chunk(len(sequence.tokens)) else whole - hits
        return chunk_blocks <= blocks.num_available - unreferenced

    # Results

    def process(self, result: StepResult) -> StepOutputs:
        """Take in the result of the oldest step in flight; returns what clients must hear."""
        batch, features = self._in_flight.popleft()
        assert batch.step_id == result.step_id, "results must arrive in the order of their steps"
        outputs = self._outputs.process(batch, result)
        for sequence in self.running.finish_step(batch.step_id):
            if sequence.preempt_requested:
                self._requeue(sequence)
        if self._latency is not None:
            self._latency.observe(features, result.seconds)
        self.drain_pending(outputs)
        self._update_stats(batch, result)
        outputs.stats = self.stats
        return outputs

    def drain_pending(self, outputs: StepOutputs) -> None:
        """Add the ends that came from no step (refused requests) to `outputs`."""
        if self._pending_finished:
            outputs.finished += self._pending_finished
            self._pending_finished = []

    def pending_outputs(self) -> StepOutputs | None:
        """News that no step will carry, or None."""
        if not self._pending_finished:
            return None
        outputs = StepOutputs(stats=self.stats)
        self.drain_pending(outputs)
        return outputs

    def _update_stats(self, batch: Batch, result: StepResult) -> None:
        s, prefix = self.stats, self.running.blocks.prefix.stats
        s.running, s.waiting = self.running.num_running, len(self.waiting)
        s.kv_usage = self.running.blocks.pool.usage
        s.prefix_queries_total, s.prefix_hits_total = prefix.queries, prefix.hits
        s.steps_total += 1
        s.last_step_tokens = batch.num_tokens
        s.last_step_seconds = result.seconds
        s.prompt_tokens_total += s.last_step_tokens - batch.num_decodes
        s.graph_misses_total += result.graph_miss

    def check_integrity(self) -> None:
        """Assert that rows, blocks, queues and requests agree; costs O(blocks)."""
        self.running.check_integrity()
        for sequence in self.waiting:
            assert sequence.state is SequenceState.WAITING
            assert sequence.row == NO_ROW
        for request in self.requests.values():
            unfinished = [s for s in request.sequences if s.state is not SequenceState.FINISHED]
            assert len(unfinished) == request.num_unfinished > 0
        if not self.requests and not self._in_flight:
            assert self.running.blocks.pool.num_used == 0, "blocks are held and nothing runs"
            assert self.running.table.num_free_rows == self.options.max_seqs, "rows are held and nothing runs"


def _as_waiting(sequence: Sequence) -> Sequence:
    sequence.state = SequenceState.WAITING
    return sequence


def _admission(sequence: Sequence) -> RowAdmission:
    """What the worker needs to sample for the sequence; token history only where a processor looks at it."""
    p = sequence.request.message.params
    history = bool(p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty or p.bad_words_token_ids)
    n = sequence.num_prompt
    return RowAdmission(
        row=sequence.row, sequence_index=sequence.index, params=p, stop_ids=sequence.stop_ids,
        prompt=sequence.tokens[:n].tobytes() if history else b"",
        output=sequence.tokens[n:].tobytes() if history else b"",
    )
