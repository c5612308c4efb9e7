"""The prompt part of a step: admission, chunks, and the forks of requests with several sequences."""

from __future__ import annotations

from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.policy import Policy
from xllm_npu.scheduling.preemption import Preemption
from xllm_npu.scheduling.running_set import RunningSet
from xllm_npu.scheduling.step_plan import StepPlan
from xllm_npu.scheduling.waiting_queue import WaitingQueue
from xllm_npu.state.batch import RowAdmission
from xllm_npu.state.request import Sequence, SequenceState


class PromptStage:
    def __init__(
        self, options: SchedulerOptions, policy: Policy, running: RunningSet, waiting: WaitingQueue,
        preemption: Preemption,
    ) -> None:
        self._options, self._policy, self._preemption = options, policy, preemption
        self._running, self._waiting = running, waiting

    def chunk_limit(self) -> int:
        return self._options.max_chunk or self._options.max_tokens

    def _may_chunk(self, tokens: int) -> bool:
        """Without chunked prefill only what a preempted sequence must recompute beyond a whole step is cut."""
        return self._options.enable_chunked_prefill or tokens > self._options.max_tokens

    def take_chunk(self, plan: StepPlan, sequence: Sequence, limit: int) -> bool:
        """Schedule the next (or, if it is in this step already, a longer) chunk of a running prompt."""
        running, table, budget = self._running, self._running.table, plan.budget
        if sequence.state is not SequenceState.RUNNING or budget.tokens <= 0:
            return False
        row = sequence.row
        first, count = plan.prefill.get(sequence, (int(table.num_computed[row]), 0))
        begin = int(table.num_computed[row])
        wanted = min(int(table.prefill_target[row]) - begin, limit, budget.tokens)
        wanted = budget.largest_chunk(wanted, begin) if wanted > 0 else 0
        whole = int(table.prefill_target[row]) - begin
        if wanted == 0 and plan.empty and not running.any_in_flight:  # a latency budget too small for anything
            wanted = min(whole, 1 if self._may_chunk(whole) else budget.tokens)
        missing = running.blocks.missing_blocks(row, begin + wanted)
        room = (running.blocks.make_room(missing) + int(table.num_blocks[row])) * self._options.block_size - begin
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
        if self._options.enable_in_batch_prefix_cache and self._options.enable_prefix_cache:
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
            if self._running.table.num_free_rows == 0:
                self._waiting.push(sibling)
                continue
            row = self._running.place_fork(sibling, lead)
            self._running.table.last_step[row] = plan.step_id
            plan.forks.append((lead, sibling))
            plan.admitted.append(self._admission(sibling))

    def admit(self, plan: StepPlan, now: float) -> None:
        """Give waiting sequences rows and their first chunk, in order, until one does not fit."""
        running, budget = self._running, plan.budget
        self._unpark()
        while not budget.exhausted:
            sequence = self._waiting.peek(now)
            if sequence is not None and self._lacks_slot(sequence, now):
                self._waiting.park(sequence)
                continue
            if sequence is None or not self._has_room(sequence):
                return
            self._waiting.remove(sequence)
            request = sequence.request
            cached = running.place(sequence)
            running.blocks.prefix.count(len(sequence.tokens), cached)
            admission = self._admission(sequence)
            if not self.take_chunk(plan, sequence, self.chunk_limit()):
                running.leave(sequence)  # no budget for it in this step: back to the head of the queue
                self._waiting.push(sequence)
                return
            if not request.first_schedule_time:
                request.first_schedule_time = now
                request.num_cached_tokens = cached
            plan.admitted.append(admission)

    def _unpark(self) -> None:
        adapters = self._running.adapters
        if adapters.count:
            self._waiting.unpark(adapters.changed)
            adapters.changed = False

    def _lacks_slot(self, sequence: Sequence, now: float) -> bool:
        """Its adapter is to wait for a slot.

        Those behind it whose adapters have slots may overtake it, but not for ever: they would keep the slots.
        """
        adapter, adapters = sequence.request.message.lora_id, self._running.adapters
        if not adapter:
            return False
        if not adapters.can_take(adapter):
            return True
        claim = self._waiting.claim
        if claim is None or not claim < sequence:
            return False
        overtakes_online = sequence.order[0] > claim.order[0]
        return overtakes_online or now - claim.request.enqueue_time > self._options.starve_seconds

    def _make_way_for_adapter(self, plan: StepPlan) -> None:
        """An online request waits for a slot that offline sequences alone keep: one of these gives way in each step."""
        claim = self._waiting.claim
        if claim is None or claim.order[0]:
            return
        running = [s for s in self._running.sequences() if s.request.message.lora_id]
        online = {s.request.message.lora_id for s in running if not s.order[0]}
        last_step = self._running.table.last_step
        victims = [s for s in running if s.request.message.lora_id not in online and last_step[s.row] != plan.step_id]
        if victims:
            self._preemption.preempt(victims[-1])

    def _has_room(self, sequence: Sequence) -> bool:
        """The gates: a free row for it and its forks, block usage, and the prompt's whole footprint."""
        running, o = self._running, self._options
        rows_needed = len(sequence.request.sequences) if sequence.fork_on_sample else 1
        return min(rows_needed, o.max_seqs) <= running.table.num_free_rows and self._blocks_fit(sequence)

    def make_way_for_online(self, plan: StepPlan, now: float) -> None:
        """An online request that does not fit takes the place of the last offline sequence, one in a step."""
        self._make_way_for_adapter(plan)
        sequence = self._waiting.peek(now)
        if sequence is None or sequence.order[0] or self._has_room(sequence):
            return
        victim = self._preemption.victim(plan, offline_only=True)
        if victim is not None:
            self._preemption.preempt(victim)

    def _blocks_fit(self, sequence: Sequence) -> bool:
        running, o = self._running, self._options
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
        used = blocks.pool.num_used * self._policy.reserve_factor + promised
        if used + whole - hits > blocks.capacity:
            return False
        chunk_blocks = min(whole - hits, 1) if self._may_chunk(len(sequence.tokens)) else whole - hits
        return chunk_blocks <= blocks.num_available - unreferenced

    def _admission(self, sequence: Sequence) -> RowAdmission:
        """What the worker needs to sample for the sequence; token history only where a processor looks at it."""
        p = sequence.request.message.params
        history = bool(
            p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty or p.bad_words_token_ids
            or p.grammar is not None)
        n = sequence.num_prompt
        return RowAdmission(
            row=sequence.row, sequence_index=sequence.index, params=p, stop_ids=sequence.stop_ids,
            prompt=sequence.tokens[:n].tobytes() if history else b"",
            output=sequence.tokens[n:].tobytes() if history else b"",
            second_rotation=0 < self._options.rotary_switch < len(sequence.tokens),
            lora_slot=self._running.adapters.slot_of(sequence.request.message.lora_id),
        )
