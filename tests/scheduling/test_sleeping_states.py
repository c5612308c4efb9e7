"""The scheduler's state machine with pauses, sleep and wake-up in any order, over an ordinary and an elastic KV cache.

A sleep empties the scripted worker's KV memory: whoever reads a block from before it gets wrong tokens.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.scheduling.test_elastic_states import ElasticSchedulerMachine
from tests.scheduling.test_scheduler_states import VOCAB, SchedulerMachine
from tests.support.scripted_worker import expected_output
from tests.support.sleepy_memory import SleepyMemory
from xllm_npu.execution.engine import SleepUnavailable
from xllm_npu.master.engine_residency import EngineResidency
from xllm_npu.memory.coordinator import SleepFailed
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE
from xllm_npu.state.messages import (
    AWAKE,
    FINISH_ABORT,
    PAUSED,
    SEQUENCES_PER_REQUEST,
    SLEEPING,
    TAGS,
    Pause,
    Resume,
    Sleep,
    Wake,
    sequence_key,
)

MESSAGES = st.one_of(
    st.builds(Pause, st.sampled_from(("abort", "wait", "keep"))), st.just(Resume()),
    st.builds(Sleep, st.integers(1, 2), st.sampled_from(("abort", "wait", "keep"))),
    st.builds(Wake, st.sampled_from(([], ["weights"], ["kv_cache"], ["weights", "kv_cache"]))))


class SleepingSchedulerMachine(SchedulerMachine):
    @initialize()
    def residency_starts(self):
        self.ended_by_pause: set[int] = set()  # requests that a pause may end
        self.must_end: set[int] = set()
        self.asked = []
        self.residency = None

    def connect(self):
        """The rules that start both parts run in any order."""
        if self.residency is None:
            self.memory_of_engine = SleepyMemory(self.lose_kv, self.check_rest)
            mapped = self.driver.worker.is_mapped
            self.driver.worker.is_mapped = lambda block: mapped(block) and self.memory_of_engine.kv_is_mapped
            self.residency = EngineResidency(self.scheduler, self.memory_of_engine)

    def lose_kv(self):
        self.driver.worker.kv[:] = -12345

    def check_rest(self):
        blocks = self.scheduler.running.blocks
        assert not self.driver.queue, "a step is in flight"
        assert blocks.pool.num_used == 0
        assert blocks.pool.num_indexed == 0, "a prefix is known"

    @precondition(lambda self: hasattr(self, "driver") and hasattr(self, "asked") and len(self.asked) < 3)
    @rule(message=MESSAGES)
    def ask(self, message):
        self.connect()
        self.asked.append(message)
        self.residency.ask(message)

    @precondition(lambda self: hasattr(self, "asked") and self.asked)
    @rule(refuse_wake=st.booleans(), refuse_sleep=st.sampled_from((None, None, SleepUnavailable, SleepFailed)))
    def advance(self, refuse_wake=False, refuse_sleep=None):
        self.memory_of_engine.refuse_wake = refuse_wake
        self.memory_of_engine.refuse_sleep = refuse_sleep and refuse_sleep("as the test says")
        message, before = self.asked[0], set(self.scheduler.requests)
        state, calls = self.residency.state, len(self.memory_of_engine.calls)
        begins = not self.residency._begun
        mode = getattr(message, "mode", "")
        if begins:
            self.must_end = self.ends_first(mode, before)
            self.ended_by_pause |= self.must_end if mode == "abort" else set()
        answer = self.residency.advance()
        pending = self.scheduler.pending_outputs()
        if pending is not None:
            self.driver.hear(pending)
        if answer is None:
            assert isinstance(message, Pause | Sleep)
            assert self.scheduler.has_work, "nothing goes on, and the answer does not come"
            return
        self.asked.pop(0)
        self.check_answer(message, answer, state, calls)
        assert not self.scheduler.requests.keys() & self.must_end

    def ends_first(self, mode, there):
        """Of the requests that are there when a message's turn comes, those that end before it is answered."""
        if mode == "abort":
            return there
        if mode == "wait" and self.residency.state != SLEEPING:
            return there - {s.request.request_id for s in self.scheduler._gate.held}
        return set()

    def check_answer(self, message, answer, before, calls):
        assert answer.state == self.residency.state
        assert (answer.level > 0) == (answer.state == SLEEPING)
        assert set(answer.tags) == self.memory_of_engine.awake
        if isinstance(message, Resume):
            assert (answer.state == AWAKE, answer.reason) == ((True, "") if before != SLEEPING else (False, "asleep"))
        elif isinstance(message, Pause):
            assert answer.state == (SLEEPING if before == SLEEPING else PAUSED)
        elif isinstance(message, Sleep):
            assert answer.state == SLEEPING or answer.reason in ("unsupported", "failed")
            assert answer.error or (self.memory_of_engine.level == answer.level >= message.level)
        elif answer.error:
            assert (answer.reason, answer.state) == ("memory", before)
        else:
            assert set(message.tags or TAGS) <= set(answer.tags)
            assert (answer.state == PAUSED) == (before == PAUSED or (before == SLEEPING and len(answer.tags) == 2))
        if before == AWAKE and isinstance(message, Wake):
            assert len(self.memory_of_engine.calls) == calls, "what is awake is woken up"

    @invariant()
    def nothing_runs_while_quiet(self):
        if hasattr(self, "driver") and getattr(self, "residency", None) and self.residency.state == SLEEPING:
            assert self.scheduler.running.num_running == 0
            assert self.scheduler.schedule() is None

    def teardown(self):
        if hasattr(self, "driver") and hasattr(self, "asked"):
            self.connect()
            for message in (Wake([]), Resume()):
                self.asked.append(message)
                self.residency.ask(message)
            while self.asked:
                while self.driver.queue:
                    self.process()
                self.schedule()
                self.advance()
            assert self.residency.state == AWAKE
        super().teardown()

    def check_output(self, request_id, index, prompt, max_tokens):
        end = self.driver.finished.get(sequence_key(request_id, index))
        if end is None or end.reason != FINISH_ABORT:
            super().check_output(request_id, index, prompt, max_tokens)
            return
        assert end.key // SEQUENCES_PER_REQUEST in self.ended_by_pause
        got = self.driver.output(request_id, index)
        assert got == expected_output(prompt, max_tokens, VOCAB, index)[: len(got)]


class SleepingElasticMachine(SleepingSchedulerMachine, ElasticSchedulerMachine):
    def check_rest(self):
        super().check_rest()
        assert self.backend.mapped == {PINNED_PAGE}
        assert self.scheduler.running.blocks.num_available <= self.backend.layout.blocks_per_page

    @invariant()
    def no_page_moves_while_the_cache_sleeps(self):
        if getattr(self, "residency", None) and not self.memory_of_engine.kv_is_mapped:
            assert self.backend.mapped == {PINNED_PAGE}


OPTIONS = settings(max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
TestSleepingScheduler = SleepingSchedulerMachine.TestCase
TestSleepingScheduler.settings = OPTIONS
TestSleepingElasticScheduler = SleepingElasticMachine.TestCase
TestSleepingElasticScheduler.settings = OPTIONS
