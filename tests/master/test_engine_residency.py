"""Sleep at chosen moments of a scheduler's life: in mid-prefill, in mid-decode, while pages are mapped ahead."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future

import pytest

from tests.scheduling.test_elastic_states import elastic
from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output
from tests.support.sleepy_memory import SleepyMemory
from xllm_npu.master.engine_residency import EngineResidency
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageGrowthRefused
from xllm_npu.state.messages import (
    AWAKE,
    FINISH_ABORT,
    PAUSED,
    SLEEPING,
    CheckWeights,
    Pause,
    Residency,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
    sequence_key,
)

VOCAB = 50_000


class Engine:
    """A scheduler over an elastic cache, overlapped, and its residency."""

    def __init__(self, overlap: bool = True, preallocate: bool = False, **options) -> None:
        self.pool_arguments, self.backend = elastic(60, preallocate=preallocate)
        mapped = self.backend.is_mapped
        self.driver = Driver(overlap, vocab=VOCAB, pool=self.pool_arguments["pool"],
                             is_mapped=lambda block: mapped(block) and self.memory.kv_is_mapped,
                             **{"max_chunk": 8, **options})
        self.scheduler = self.driver.scheduler
        self.memory = SleepyMemory(self.lose)
        self.residency = EngineResidency(self.scheduler, self.memory)

    def lose(self) -> None:
        assert self.backend.mapped == {PINNED_PAGE}
        self.driver.worker.kv[:] = -12345

    def add(self, request_id: int, length: int, max_tokens: int, **params) -> list[int]:
        """What it will answer."""
        prompt = list(range(request_id, request_id + length))
        self.scheduler.add(add_request(request_id, prompt, max_tokens=max_tokens, **params))
        return expected_output(prompt, max_tokens, VOCAB)

    def change(self, message) -> Residency:
        self.residency.ask(message)
        for _ in range(1000):
            answer = self.residency.advance()
            self.scheduler.check_integrity()
            if answer is not None:
                pending = self.scheduler.pending_outputs()
                if pending is not None:
                    self.driver.hear(pending)
                return answer
            self.driver.step()
        raise AssertionError(f"{message} does not come about")

    def wake(self) -> None:
        assert self.change(Wake([])).state == PAUSED
        assert self.change(Resume()).state == AWAKE

    def finish(self) -> None:
        self.driver.run()
        self.pool_arguments["pool"].pages.wait_settled()
        assert self.backend.mapped == {PINNED_PAGE}
        self.scheduler.close()


@pytest.mark.parametrize(("steps", "overlap"), list(itertools.product(range(0, 14, 2), (True, False))))
def test_kept_requests_give_the_tokens_of_an_undisturbed_run(steps, overlap):
    """After so many steps one prompt is in the middle, some decode, one forks, and one waits for a row."""
    engine = Engine(overlap, max_seqs=4, max_tokens=16)
    expected = {0: engine.add(0, 6, 30), 1: engine.add(1, 90, 12), 2: engine.add(2, 10, 20), 3: engine.add(3, 5, 9)}
    prompt = list(range(4, 12))
    engine.scheduler.add(add_request(4, prompt, max_tokens=10, n=3))
    for level in (1, 2):
        for _ in range(steps):
            engine.driver.step()
        answer = engine.change(Sleep(level, "keep"))
        assert (answer.state, answer.level, answer.tags, answer.freed_bytes) == (SLEEPING, level, [], 1000)
        assert not engine.scheduler.has_work
        assert engine.scheduler.running.num_running == 0
        engine.wake()
    engine.finish()
    assert {i: engine.driver.output(i) for i in expected} == expected
    assert [engine.driver.output(4, i) for i in range(3)] == [expected_output(prompt, 10, VOCAB, i) for i in range(3)]
    assert engine.scheduler.stats.prefix_hits_total == engine.driver.scheduler.running.blocks.prefix.stats.hits


def test_mid_prefill_is_where_it_says():
    engine = Engine(max_tokens=16)
    expected = engine.add(0, 90, 5)
    for _ in range(3):
        engine.driver.step()
    assert engine.scheduler.running.num_prefilling == 1
    assert not engine.driver.output(0)
    engine.change(Sleep(1, "keep"))
    assert len(engine.scheduler.waiting) == 1
    engine.wake()
    engine.finish()
    assert engine.driver.output(0) == expected


def test_no_prefix_from_before_the_sleep_is_found():
    engine = Engine()
    holder = engine.add(0, 40, 60)
    for _ in range(12):
        engine.driver.step()
    engine.add(1, 40, 1)
    engine.scheduler.abort([sequence_key(1, 0)])
    assert engine.scheduler.running.blocks.pool.num_indexed > 0
    engine.change(Sleep(1, "keep"))
    assert engine.scheduler.running.blocks.pool.num_indexed == 0
    engine.scheduler.abort([sequence_key(0, 0)])
    engine.wake()
    hits = engine.scheduler.running.blocks.prefix.stats.hits
    prompt = list(range(40))
    engine.scheduler.add(add_request(2, prompt, max_tokens=4))
    engine.finish()
    assert engine.driver.output(2) == expected_output(prompt, 4, VOCAB) == holder[:4]
    assert engine.scheduler.running.blocks.prefix.stats.hits == hits


def test_rule_52_sleep_waits_for_the_page_that_is_being_mapped_ahead():
    engine = Engine(preallocate=True)
    mapping, go_on = threading.Event(), threading.Event()
    pages = engine.pool_arguments["pool"].pages

    def hold() -> None:
        """The thread stops in a call, when there are enough pages for the steps to go on meanwhile."""
        if threading.current_thread().name == "kv-pages" and pages.stats().reserved >= 2:
            mapping.set()
            assert go_on.wait(20)

    engine.backend.before_map = hold
    expected = engine.add(0, 30, 20)
    for _ in range(4):
        engine.driver.step()
    assert mapping.wait(20), "nothing is mapped ahead"
    answers: list[Residency] = []
    sleeping = threading.Thread(target=lambda: answers.append(engine.change(Sleep(1, "keep"))))
    sleeping.start()
    sleeping.join(0.1)
    assert not answers, "memory was given back while a page was being mapped"
    go_on.set()
    sleeping.join(20)
    assert answers[0].state == SLEEPING
    assert engine.backend.mapped == {PINNED_PAGE}
    engine.backend.before_map = lambda: pytest.fail("something is mapped while the cache sleeps")
    pages.wait_settled()
    assert pages.num_available == 0
    engine.backend.before_map = lambda: None
    engine.wake()
    engine.finish()
    assert engine.driver.output(0) == expected


def test_abort_of_a_kept_request_while_asleep():
    engine = Engine()
    gone, kept = engine.add(0, 20, 30), engine.add(1, 20, 30)
    for _ in range(8):
        engine.driver.step()
    engine.change(Sleep(1, "keep"))
    engine.scheduler.abort([sequence_key(0, 0)])
    engine.scheduler.check_integrity()
    late = engine.add(2, 8, 3)
    engine.wake()
    engine.finish()
    assert engine.driver.output(0) == gone[: len(engine.driver.output(0))]
    assert (engine.driver.output(1), engine.driver.output(2)) == (kept, late)
    assert 0 not in engine.driver.finished


def test_abort_ends_all_and_says_so():
    engine = Engine(max_seqs=2)
    answers = [engine.add(i, 20, 30) for i in range(4)]
    engine.scheduler.add(add_request(4, [1, 2], max_tokens=4, n=2))
    for _ in range(8):
        engine.driver.step()
    assert engine.change(Pause("abort")).state == PAUSED
    assert not engine.scheduler.requests
    ends = {end.key: end.reason for end in engine.driver.finished.values()}
    assert ends == dict.fromkeys([*(sequence_key(i, 0) for i in range(5)), sequence_key(4, 1)], FINISH_ABORT)
    for i, answer in enumerate(answers):
        assert engine.driver.output(i) == answer[: len(engine.driver.output(i))]
    engine.change(Resume())
    engine.finish()


def test_wait_lets_open_requests_finish_and_parts_of_them_pass():
    engine = Engine(max_seqs=2)
    first = [engine.add(i, 20, 10) for i in range(4)]
    engine.driver.step()
    engine.residency.ask(Pause("wait"))
    assert engine.residency.advance() is None
    late = engine.add(4, 20, 5)
    part = engine.add(5, 10, 3)
    engine.scheduler.abort([sequence_key(5, 0)])
    message = add_request(6, list(range(6, 16)), max_tokens=3)
    message.continues = True
    engine.scheduler.add(message)
    while (answer := engine.residency.advance()) is None:
        engine.driver.step()
        engine.scheduler.check_integrity()
    assert answer.state == PAUSED
    assert [engine.driver.output(i) for i in range(4)] == first
    assert engine.driver.output(6) == expected_output(range(6, 16), 3, VOCAB)
    assert (engine.driver.output(4), engine.driver.output(5)) == ([], [])
    message = add_request(7, list(range(7, 17)), max_tokens=3)  # it comes between two parts, when nothing runs
    message.continues = True
    engine.scheduler.add(message)
    assert engine.scheduler.has_work
    assert engine.change(Pause("wait")).state == PAUSED
    assert engine.driver.output(7) == expected_output(range(7, 17), 3, VOCAB)
    assert not engine.driver.output(4)
    engine.change(Resume())
    engine.finish()
    assert (engine.driver.output(4), engine.driver.output(5)) == (late, [])
    assert part


@pytest.mark.parametrize(("woken", "level"), [("weights", 1), ("kv_cache", 2)])
def test_weights_that_are_dropped_stay_so_until_they_wake(woken, level):
    engine = Engine()
    expected = engine.add(0, 30, 10)
    engine.driver.step()
    assert engine.change(Sleep(2, "keep")).level == 2
    answer = engine.change(Wake([woken]))
    assert (answer.state, answer.level, answer.tags) == (SLEEPING, 2, [woken])
    answer = engine.change(Sleep(1, "keep"))
    assert (answer.state, answer.level, answer.tags, engine.memory.level) == (SLEEPING, level, [], level)
    engine.wake()
    engine.finish()
    assert engine.driver.output(0) == expected


@pytest.mark.parametrize(("reason", "said"), [("memory", "memory"), ("ledger", "memory"), ("weights", "failed"),
                                              ("worker", "failed")])
def test_only_a_want_of_memory_is_called_one(monkeypatch, reason, said):
    """For that other models are put to sleep; it would not bring files back that have changed."""
    engine = Engine()
    engine.change(Sleep(1, "abort"))

    def refuse(tags):
        raise PageGrowthRefused(reason, "As the test says.")

    monkeypatch.setattr(engine.memory, "wake", refuse)
    answer = engine.change(Wake([]))
    assert (answer.state, answer.reason, answer.error) == (SLEEPING, said, "As the test says.")
    monkeypatch.undo()
    engine.wake()
    engine.finish()


def test_a_stalled_request_does_not_run_out_of_time_in_a_pause(monkeypatch):
    from xllm_npu.scheduling import scheduler as scheduler_module

    monkeypatch.setattr(scheduler_module, "STALL_SECONDS", 0.0)
    engine = Engine()
    expected = engine.add(0, 30, 3)
    engine.backend.most = 2
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.stalled
    engine.change(Pause("keep"))
    for _ in range(3):
        assert engine.scheduler.schedule() is None
    assert not engine.scheduler.stalled
    engine.backend.most = 60
    engine.change(Resume())
    engine.finish()
    assert engine.driver.output(0) == expected


@pytest.mark.parametrize(("steps", "overlap"), list(itertools.product((0, 9), (True, False))))
def test_an_update_of_the_weights_has_all_requests_computed_anew(steps, overlap):
    """The worker loses its KV with each, and would notice a block that is read."""
    engine = Engine(overlap, max_seqs=4, max_tokens=16)
    expected = {0: engine.add(0, 6, 30), 1: engine.add(1, 90, 12), 2: engine.add(2, 10, 20), 3: engine.add(3, 5, 9)}
    engine.memory._lose_kv = lambda: engine.driver.worker.kv.fill(-12345)
    for _ in range(2):
        for _ in range(steps):
            engine.driver.step()
        answer = engine.change(UpdateWeights("new"))
        assert (answer.state, answer.error) == (PAUSED, "")
        assert engine.scheduler.running.num_running == engine.scheduler.running.blocks.pool.num_indexed == 0
        assert not engine.scheduler.has_work
        assert engine.change(Resume()).state == AWAKE
    engine.finish()
    assert {i: engine.driver.output(i) for i in expected} == expected


def test_steps_go_on_while_a_checkpoint_is_checked():
    engine = Engine()
    expected = engine.add(0, 8, 4)
    checked = engine.memory.checked = Future[None]()
    engine.residency.ask(CheckWeights("new"))
    engine.residency.ask(Pause("keep"))
    while engine.scheduler.has_work:
        assert engine.residency.advance() is None
        engine.driver.step()
    assert engine.driver.output(0) == expected
    assert engine.residency.advance() is None
    checked.set_result(None)
    answers = [engine.residency.advance(), engine.residency.advance()]
    assert [(a.state, a.error) for a in answers] == [(AWAKE, ""), (PAUSED, "")]
    assert engine.memory.calls == ["check new"]


def test_a_refused_check_and_a_failed_load_say_why():
    engine = Engine()
    expected = engine.add(0, 20, 8)
    for _ in range(3):
        engine.driver.step()
    engine.memory.refuse_check = "It is another network."
    answer = engine.change(CheckWeights("new"))
    assert (answer.state, answer.reason, answer.error) == (AWAKE, "checkpoint", "It is another network.")
    engine.memory.refuse_load = "The disk is gone."
    answer = engine.change(UpdateWeights("new"))
    assert (answer.state, answer.reason, answer.error) == (PAUSED, "failed", "The disk is gone.")
    engine.change(Resume())
    engine.finish()
    assert engine.driver.output(0) == expected


def test_weights_that_are_kept_for_the_wake_up_are_not_replaced():
    engine = Engine()
    engine.change(Sleep(1, "keep"))
    assert engine.change(UpdateWeights("new")).reason == "asleep"
    engine.change(Wake(["weights"]))
    assert engine.change(UpdateWeights("new")).error == ""
    engine.change(Sleep(2, "keep"))
    answer = engine.change(UpdateWeights("newer"))
    assert (answer.state, answer.level, answer.error) == (SLEEPING, 2, "")
    assert [call for call in engine.memory.calls if "load" in call] == ["load new", "load newer"]
    engine.wake()
    engine.finish()
