"""The scheduler as a hypothesis state machine: any order of arrivals, aborts, schedules and results.

After every rule the tables, blocks, prefix index and queues must agree, and the scripted worker checks that every KV
read finds what the sequence itself wrote or shares. At the end everything must be free.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output
from xllm_npu.execution.step_message import build_step_input
from xllm_npu.state.messages import FINISH_LENGTH, FINISH_STOP, sequence_key

VOCAB = 50


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(("prefill_first", "decode_first", "unified")), prefix=st.booleans(),
        chunked=st.booleans(), in_batch=st.booleans(), num_blocks=st.integers(13, 40), max_seqs=st.integers(1, 6),
        max_chunk=st.sampled_from((0, 3, 8)), strategy=st.sampled_from(("fcfs", "priority", "sjf", "density")),
    )
    def start(self, policy, prefix, chunked, in_batch, num_blocks, max_seqs, max_chunk, strategy):
        self.driver = Driver(
            **self.memory(num_blocks),
            policy=policy, enable_prefix_cache=prefix, enable_chunked_prefill=chunked, num_blocks=num_blocks,
            enable_in_batch_prefix_cache=in_batch, max_seqs=max_seqs, max_chunk=max_chunk if chunked else 0,
            priority_strategy=strategy, max_tokens=32, max_model_len=48, vocab=VOCAB, eos_token_ids=(VOCAB - 1,),
        )
        self.scheduler = self.driver.scheduler
        self.prompts: dict[int, tuple[list[int], int, int]] = {}

    def memory(self, num_blocks):
        """Arguments of `Driver`."""
        return {}

    @rule(shared=st.integers(0, 24), own=st.lists(st.integers(0, 9), min_size=1, max_size=6),
          max_tokens=st.integers(1, 14), n=st.sampled_from((1, 1, 1, 2, 4)), priority=st.integers(-2, 2),
          offline=st.booleans())
    def add(self, shared, own, max_tokens, n, priority, offline):
        request_id = len(self.prompts)
        prompt = [*range(shared), *own]
        self.prompts[request_id] = (prompt, max_tokens, n)
        self.scheduler.add(add_request(request_id, prompt, max_tokens=max_tokens, n=n, priority=priority,
                                       offline=offline))

    @rule()
    def schedule(self):
        if self.scheduler.num_in_flight >= 2:
            return
        group = self.scheduler.schedule()
        if group is not None:
            batch = group.batches[0]
            assert batch.num_tokens <= 32
            self.driver.queue.append(build_step_input(batch, group.tables[0], 4))

    @precondition(lambda self: self.driver.queue)
    @rule()
    def process(self):
        self.driver.hear(self.scheduler.process(self.driver.worker.execute(self.driver.queue.popleft())))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        n = self.prompts[request_id][2]
        indices = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
        self.driver.abort([sequence_key(request_id, i) for i in indices])

    @invariant()
    def everything_agrees(self):
        if hasattr(self, "driver"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.driver.depth = 1
        self.driver.run()
        assert self.scheduler.running.blocks.pool.num_used == 0
        for request_id, (prompt, max_tokens, n) in self.prompts.items():
            for index in range(n):
                self.check_output(request_id, index, prompt, max_tokens)

    def check_output(self, request_id, index, prompt, max_tokens):
        key = sequence_key(request_id, index)
        wanted = expected_output(prompt, max_tokens, VOCAB, index)
        if VOCAB - 1 in wanted:
            wanted = wanted[: wanted.index(VOCAB - 1) + 1]
        got = self.driver.output(request_id, index)
        if key in self.driver.aborted:
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
            stopped = wanted[-1] == VOCAB - 1
            assert self.driver.finished[key].reason == (FINISH_STOP if stopped else FINISH_LENGTH)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
