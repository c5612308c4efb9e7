"""What runs next: one continuous-batching loop that serves the segments a policy yields.

    batches = scheduler.schedule()
    outputs = engine.execute(batches)
    scheduler.process(outputs)

`schedule` may run again before the step before it has been processed (overlapped scheduling): counters advance when
work is scheduled, tokens become known when results are processed, and rows leave when their last step has ended.
The parts: decode_stage.py, prompt_stage.py, preemption.py, and output_processor.py for results.
Knows token ids only; no device, no text, no clock but the one it is given.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import numpy.typing as npt

from xllm_npu.scheduling.budget import StepBudget
from xllm_npu.scheduling.decode_stage import DecodeStage
from xllm_npu.scheduling.latency_model import LatencyModel
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.output_processor import OutputProcessor
from xllm_npu.scheduling.pause_gate import PauseGate
from xllm_npu.scheduling.policy import Kind, Segment, get_policy
from xllm_npu.scheduling.preemption import Preemption
from xllm_npu.scheduling.prompt_stage import PromptStage
from xllm_npu.scheduling.running_set import RunningSet
from xllm_npu.scheduling.step_plan import StepPlan
from xllm_npu.scheduling.strategy import get_strategy
from xllm_npu.scheduling.waiting_queue import WaitingQueue
from xllm_npu.state.batch import Batch, BatchGroup, StepResult
from xllm_npu.state.batch_table import DECODE, STOP_COLUMNS
from xllm_npu.state.kv_cache.block_pool import BlockPool
from xllm_npu.state.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    SEQUENCES_PER_REQUEST,
    AddRequest,
    EngineStats,
    Finished,
    PauseMode,
    StepOutputs,
    sequence_key,
)
from xllm_npu.state.request import NO_ROW, Request, Sequence, SequenceState
from xllm_npu.state.stopping import max_total_tokens, stop_token_ids

I32 = npt.NDArray[np.int32]
STALL_SECONDS = 30.0  # that requests wait for memory which others have, when none of theirs can go on
NO_MEMORY = "There is no memory left for the KV cache of this request; others on the device use it."


class Scheduler:
    """The scheduler of one engine (one data-parallel rank)."""

    def __init__(self, options: SchedulerOptions, pool: BlockPool | None = None) -> None:
        """`pool`: where the KV blocks come from; None: one of `options.num_blocks`, all of them there."""
        self.options = options
        self.policy = get_policy(options.policy)
        self.running = RunningSet(options, pool)
        starve_seconds = options.starve_seconds if options.enable_starve_prevent else None
        self.waiting = WaitingQueue(starve_seconds, self.running.blocks.prefix, options.rotary_switch)
        self.requests: dict[int, Request] = {}
        self.stats = EngineStats()
        self._strategy = get_strategy(options.priority_strategy)
        self._preemption = Preemption(self.running, self.waiting, self.stats)
        self._decodes = DecodeStage(self.running, self._preemption)
        self._prompts = PromptStage(options, self.policy, self.running, self.waiting, self._preemption)
        self._outputs = OutputProcessor(self.running, self.requests, self.stats)
        self._latency = LatencyModel() if options.latency_aware else None
        self._in_flight: deque[tuple[Batch, tuple[float, ...]]] = deque()
        self._pending_finished: list[Finished] = []
        self._next_step = 0
        self._stalled_since: float | None = None
        self._gate = PauseGate()
        self._arrivals = 0
        self._unprepared: dict[int, tuple[Sequence, bool]] = {}  # by request: its lead; whether the gate holds it back

    # Requests in

    def add(self, message: AddRequest, prepared: bool = True) -> None:
        """Queue a request. One that could never fit ends at once with an error in the next outputs.

        One that is not `prepared` is open, and not scheduled before `set_prepared`.
        """
        params = message.params
        prompt = message.prompt_token_ids
        self._arrivals += 1
        request = Request(message, prompt, self._arrivals, enqueue_time=time.monotonic())
        max_total = max_total_tokens(params, len(prompt), self.options.max_model_len)
        if self.options.pooling:
            max_total = len(prompt) + 1  # as if its last token were in flight: it never decodes
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
        held_back = self._gate.holds_back(message)
        if not prepared:
            self._unprepared[request.request_id] = lead, held_back
        elif held_back:
            self._gate.hold(lead)
        else:
            self.waiting.push(lead)

    def set_prepared(self, request_id: int, failure: str = "") -> None:
        """A request that was not `prepared` can run now; or never, then it ends with `failure`.

        Harmless if it has ended meanwhile.
        """
        lead, held_back = self._unprepared.pop(request_id, (None, False))
        if lead is None:
            return
        if failure:
            keys = [s.key for s in lead.request.sequences if s.state is not SequenceState.FINISHED]
            self.abort(keys)
            self._pending_finished += [Finished(key, FINISH_ERROR, message=failure) for key in keys]
        elif held_back and self._gate.holds_back(lead.request.message):
            self._gate.hold(lead)
        else:
            self.waiting.push(lead)

    def refuse(self, message: AddRequest, reason: str) -> None:
        """End a request that was never queued, with an error in the next outputs."""
        keys = [sequence_key(message.request_id, i) for i in range(message.params.num_sequences)]
        self._pending_finished += [Finished(key, FINISH_ERROR, message=reason) for key in keys]

    def _impossible(self, request: Request, max_total: int) -> str | None:
        """Why this request can never be served, or None."""
        o, n = self.options, len(request.prompt)
        longest = o.max_model_len if o.pooling else o.max_model_len - 1
        need = self.running.blocks.blocks_for(n if o.pooling else max_total)
        have = self.running.blocks.pool.most_blocks
        if n == 0 or n > longest:
            return f"The prompt has {n} tokens; this server takes 1 to {longest}."
        if not o.enable_chunked_prefill and n > o.max_tokens:
            return f"The prompt has {n} tokens; without chunked prefill at most {o.max_tokens} fit into one step."
        if need > have:
            return (f"Prompt and max_tokens come to {max_total} tokens or {need} KV cache blocks; "
                    f"the cache has {have} blocks.")
        if request.request_id in self.requests:
            return "A request with this id is running."
        if request.message.lora_id and request.message.lora_id not in self.running.adapters.loaded:
            return "The adapter that the request names is not loaded any more."
        return None

    def abort(self, keys: list[int]) -> None:
        """End sequences now; nothing is reported for them. Unknown keys are ones that ended already."""
        for key in keys:
            request = self.requests.get(key // SEQUENCES_PER_REQUEST)
            index = key % SEQUENCES_PER_REQUEST
            if request is not None and index < len(request.sequences):
                self._end(request.sequences[index])
        self._settle()

    def abort_all(self) -> None:
        for request in list(self.requests.values()):
            self.abort([s.key for s in request.sequences])

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        held = self._gate.forget(sequence)
        lead, held_back = self._unprepared.get(sequence.request.request_id, (None, False))
        if lead is sequence:
            del self._unprepared[sequence.request.request_id]
            self._hand_over_unprepared(sequence, held_back)
        elif sequence.fork_on_sample:
            self._hand_over_lead(sequence, held)
        self._outputs.finish(sequence)

    def _hand_over_unprepared(self, lead: Sequence, held_back: bool) -> None:
        rest = [s for s in lead.request.sequences if s is not lead and s.state is not SequenceState.FINISHED]
        if rest:
            lead.fork_on_sample, rest[0].fork_on_sample = False, len(rest) > 1
            self._unprepared[lead.request.request_id] = rest[0], held_back

    def _hand_over_lead(self, lead: Sequence, held: bool) -> None:
        """The sequence that computes the prompt ends before it forked: the next sibling takes its part."""
        lead.fork_on_sample = False
        rest = [s for s in lead.request.sequences if s is not lead and s.state is not SequenceState.FINISHED]
        if rest:
            rest[0].fork_on_sample = len(rest) > 1
            if held:
                self._gate.hold(rest[0])
            else:
                self.waiting.push(rest[0])

    @property
    def has_work(self) -> bool:
        """Something runs or waits and may go on, is in flight, or has news to report."""
        return bool(self._in_flight or self._pending_finished or (self.requests and not self._stopped))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # Pauses

    def pause(self, mode: PauseMode) -> None:
        """Schedule nothing more; the modes are those of `Pause`. May be called again, with another one.

        What ends by it is in the next outputs. It has come about when `quiet`.
        """
        if mode == "abort":
            for request in list(self.requests.values()):
                keys = [s.key for s in request.sequences if s.state is not SequenceState.FINISHED]
                self.abort(keys)
                self._pending_finished += [Finished(key, FINISH_ABORT) for key in keys]
        self._gate.close(lets_finish=mode == "wait")

    @property
    def _stopped(self) -> bool:
        return self._gate.stops(len(self.requests))

    @property
    def quiet(self) -> bool:
        """Paused, and nothing is in flight nor has to finish first."""
        return self._stopped and not self._in_flight

    def resume(self) -> None:
        for lead in self._gate.open():
            self.waiting.push(lead)

    def forget_computed(self) -> None:
        """While quiet: all that run give way, to be computed anew, and no prefix is known."""
        assert self.quiet, "a step is in flight, or a request has to finish first"
        for sequence in self.running.sequences():
            self._preemption.preempt(sequence)
        self.running.blocks.prefix.reset()
        self._settle()

    def let_go(self) -> None:
        """`forget_computed`, and no KV block has memory."""
        self.forget_computed()
        self.running.blocks.pool.freeze()

    def reset_prefix_cache(self) -> None:
        """No prefix is known from now on; what runs keeps its blocks."""
        self.running.blocks.prefix.reset()

    def take_hold(self) -> None:
        """KV blocks may have memory again, after `let_go`."""
        self.running.blocks.pool.thaw()

    # Adapters

    def add_lora(self, lora_id: int) -> None:
        """Workers have it: requests may name it."""
        self.running.adapters.add(lora_id)

    def uses_lora(self, lora_id: int) -> bool:
        """Whether an open request names it."""
        return any(request.message.lora_id == lora_id for request in self.requests.values())

    def forget_lora(self, lora_id: int) -> None:
        """No open request names it, and none may from now on. No step that is scheduled later uses it."""
        self.running.adapters.forget(lora_id)

    # Schedule

    def schedule(self) -> BatchGroup | None:
        """The next step, or None if nothing can be scheduled before a step in flight has been processed."""
        if self._stopped:
            self._stalled_since = None
            return None
        now = time.monotonic()
        self.running.blocks.pool.begin_step(self._next_step)
        plan = self._plan(now)
        while plan.empty and not self._in_flight and (plan.gave_way or self._preemption.relieve()):
            plan = self._plan(now)  # blocks were held by sequences that could not go on; one gave way
        self._watch_stall(plan, now)
        if plan.empty:
            self._settle()
            return None
        released, self.running.released = self.running.released, []
        batch = plan.build(self.running.table, released, self.running.adapters.take_loads())
        self._in_flight.append((batch, plan.budget.features() if self._latency else ()))
        self.running.any_in_flight = True
        self._next_step += 1
        return BatchGroup([batch], [self.running.table])

    @property
    def stalled(self) -> bool:
        """Requests are open and none can go on: others use the memory that their KV blocks need."""
        return self._stalled_since is not None

    def _watch_stall(self, plan: StepPlan, now: float) -> None:
        """Where memory does not come free for long, the first request in line ends with an error."""
        if not self.running.blocks.pool.elastic or not plan.empty or self._in_flight or (
                len(self.requests) == len(self._unprepared)):
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since > STALL_SECONDS:
            self._stalled_since = now
            running = self.running.sequences()
            sequence = running[0] if running else self.waiting.peek(now)
            if sequence is not None:
                self._pending_finished.append(Finished(sequence.key, FINISH_ERROR, message=NO_MEMORY))
                self._end(sequence)

    def _plan(self, now: float) -> StepPlan:
        o = self.options
        budget = StepBudget(o.max_tokens, o.max_seqs)
        if self._latency is not None:
            budget.model = self._latency
            budget.seconds = self.policy.step_seconds(self.running, o.max_ttft_seconds, o.max_tpot_seconds, now)
        plan = StepPlan(self._next_step, budget)
        if o.enable_online_preempt_offline and len(self.waiting) and self.running.num_offline:
            self._prompts.make_way_for_online(plan, now)
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
                self._decodes.take(plan, rows)
        elif segment.kind is Kind.CHUNK:
            if self.running.num_prefilling:
                sequences = self.running.prefilling() if segment.sequences is None else segment.sequences
                for sequence in sequences:
                    self._prompts.take_chunk(plan, sequence, self._prompts.chunk_limit())
        elif segment.kind is Kind.ADMIT:
            if len(self.waiting):
                self._prompts.admit(plan, now)
        elif plan.prefill and self.options.max_chunk:
            for sequence in list(plan.prefill):
                self._prompts.take_chunk(plan, sequence, plan.budget.tokens)

    # Results

    def process(self, result: StepResult) -> StepOutputs:
        """Take in the result of the oldest step in flight; returns what clients must hear."""
        batch, features = self._in_flight.popleft()
        self.running.any_in_flight = bool(self._in_flight)
        assert batch.step_id == result.step_id, "results must arrive in the order of their steps"
        outputs = self._outputs.process(batch, result)
        for sequence in self.running.finish_step(batch.step_id):
            if sequence.preempt_requested:
                self._preemption.requeue(sequence)
        self._settle()
        if self._latency is not None:
            self._latency.observe(features, result.seconds)
        self.drain_pending(outputs)
        self._update_stats(batch, result)
        outputs.stats = self.stats
        return outputs

    def _settle(self) -> None:
        """Blocks of steps that have ended may lose their memory."""
        self.running.blocks.pool.settle(self.running.completed_step, bool(self._in_flight))

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

    def update_gauges(self) -> None:
        """What `stats` says of this moment."""
        s, pool = self.stats, self.running.blocks.pool
        s.running, s.waiting = self.running.num_running, len(self.waiting) + len(self._unprepared)
        s.kv_usage, s.free_blocks, s.pages = pool.usage, pool.num_available, pool.page_stats()
        s.stalled = self.stalled
        if self.options.max_loras:
            s.running_loras = self.running.adapters.running
            s.waiting_loras = sorted(self.waiting.adapters)

    def _update_stats(self, batch: Batch, result: StepResult) -> None:
        s, prefix = self.stats, self.running.blocks.prefix.stats
        self.update_gauges()
        s.prefix_queries_total, s.prefix_hits_total = prefix.queries, prefix.hits
        s.steps_total += 1
        s.last_step_tokens = batch.num_tokens
        s.last_step_seconds = result.seconds
        s.prompt_tokens_total += s.last_step_tokens - batch.num_decodes
        s.graph_misses_total += result.graph_miss
        s.prefill_graph_misses_total += result.prefill_graph_miss

    def close(self) -> None:
        """Nothing is scheduled any more."""
        self.running.blocks.pool.close()

    def check_integrity(self) -> None:
        """Assert that rows, blocks, queues and requests agree; costs O(blocks)."""
        self.running.check_integrity()
        self._gate.check_integrity()
        for sequence in self.waiting:
            assert sequence.state is SequenceState.WAITING
            assert sequence.row == NO_ROW
            assert sequence not in self._gate.held, "a sequence waits and is held back"
        self.waiting.check_integrity()
        for request_id, (lead, _) in self._unprepared.items():
            assert self.requests[request_id] is lead.request
            assert lead not in self.waiting, "a sequence waits before it is prepared"
            assert (lead.state, lead.row) == (SequenceState.WAITING, NO_ROW)
        for request in self.requests.values():
            unfinished = [s for s in request.sequences if s.state is not SequenceState.FINISHED]
            assert len(unfinished) == request.num_unfinished > 0
        if not self.requests and not self._in_flight:
            assert self.running.blocks.pool.num_used == 0, "blocks are held and nothing runs"
            assert self.running.table.num_free_rows == self.options.max_seqs, "rows are held and nothing runs"
