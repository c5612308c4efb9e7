"""Sleep and wake-up over several workers: what happens when one refuses, fails, does not hear or is not heard."""

from __future__ import annotations

import threading

import pytest

from tests.support.book_driver import GRANULE, fail_nth
from tests.support.sleeping_workers import LAYOUT, LOSSES, WEIGHT_PAGES, Workers, offsets
from xllm_npu.memory.coordinator import SleepFailed
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.worker_memory import MemoryCall
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.messages import KV_CACHE_TAG, WEIGHTS_TAG


@pytest.mark.parametrize("level", [1, 2])
def test_rules_43_and_49_all_workers_sleep_and_wake_in_one_transaction_each(level):
    workers = Workers()
    workers.check(1, True)
    assert workers.coordinator.sleep(level) == (sum(WEIGHT_PAGES) + 2 * LAYOUT.num_regions) * GRANULE
    workers.check(0, False)
    assert [len(driver.ranges) for driver in workers.drivers] == [LAYOUT.num_regions + 1] * 2, "addresses stay"
    workers.coordinator.wake()
    workers.check(1, True)
    for wire in workers.wires:
        said = [(call.verb, call.tags) for call in wire.heard if call.verb not in ("growable", "weight_pages")]
        assert said == [("prepare_sleep", []), ("commit_sleep", []), ("prepare_wake", ["weights", "kv_cache"]),
                        ("commit_wake", []), ("finish_wake", [])]
    workers.coordinator.map(offsets(1))
    workers.check(2, True)


def test_tags_wake_one_after_the_other_and_twice_is_once():
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.coordinator.wake(["weights"])
    workers.check(0, True)
    workers.coordinator.wake(["weights"])
    workers.coordinator.wake(["kv_cache"])
    workers.check(1, True)
    workers.coordinator.wake()
    workers.check(1, True)
    workers.coordinator.sleep(1)
    workers.coordinator.wake(["kv_cache"])
    workers.check(1, False)
    workers.coordinator.sleep(2)
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(1, True)


def test_a_sleeping_model_sleeps_deeper_and_not_lighter():
    workers = Workers()
    workers.coordinator.sleep(1)
    assert workers.coordinator.sleep(2) == 0
    assert [r.residency._kept.level for r in workers.resources] == [2, 2]
    assert workers.coordinator.sleep(1) == 0
    assert [r.residency._kept.level for r in workers.resources] == [2, 2]
    workers.coordinator.wake()
    workers.check(1, True)


def test_rule_7_one_ledger_for_weights_and_kv_cache():
    workers = Workers(total_pages=2)
    budget = workers.coordinator.budget
    assert (budget.reserved(WEIGHTS_TAG), budget.reserved(KV_CACHE_TAG)) == (5, 3)
    workers.coordinator.map(offsets(1))
    with pytest.raises(PageGrowthRefused):
        workers.coordinator.map(offsets(2))
    workers.check(2, True)


def test_rule_21_a_fixed_arena_sleeps_too():
    workers = Workers(elastic=False)
    workers.check(LAYOUT.num_pages, True)
    workers.coordinator.sleep(1)
    workers.check(0, False)
    assert not any(driver.pages for driver in workers.drivers)
    workers.coordinator.wake()
    workers.check(LAYOUT.num_pages, True)


def test_rule_5_weights_alone():
    workers = Workers(kv=False)
    workers.check(0, True)
    workers.coordinator.sleep(2)
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(0, True)


def test_a_sleep_waits_for_the_tail_of_a_step():
    """Rank 0 has a step's result before the others have ended it."""
    workers, asked = Workers(), threading.Event()
    start = workers.wires[1].start

    def tell(call: MemoryCall) -> None:
        start(call)
        if call.verb == "commit_sleep":
            asked.set()

    workers.wires[1].start = tell  # type: ignore[method-assign]
    stepping = workers.resources[1].residency.stepping
    with stepping:
        sleeper = threading.Thread(target=workers.coordinator.sleep, args=(1,))
        sleeper.start()
        assert asked.wait(20)
        assert len(workers.drivers[1].mapped) == WEIGHT_PAGES[1] + LAYOUT.num_regions
    sleeper.join(20)
    workers.check(0, False)


def test_pages_of_requests_are_no_state_to_sleep_in():
    workers = Workers()
    workers.coordinator.map(offsets(2))
    with pytest.raises(SleepFailed, match="in use"):
        workers.coordinator.sleep(1)
    workers.check(2, True)
    workers.coordinator.unmap(offsets(2))
    workers.coordinator.sleep(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rule_44_contents_that_cannot_be_kept_leave_all_awake(rank):
    workers = Workers()
    workers.models[rank].fault = fail_nth("save", 1, MemoryError)
    with pytest.raises(SleepFailed):
        workers.coordinator.sleep(1)
    workers.check(1, True)
    assert [r.residency._saved for r in workers.resources] == [None, None], "what was kept is let go"
    workers.coordinator.sleep(1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("call", "n"), [("create_page", 1), ("create_page", 7), ("map", 1), ("map", 5), ("map", 7)])
def test_rule_44_a_wake_up_is_undone_on_all_workers_before_the_ledger(rank, call, n):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.drivers[rank].fault = fail_nth(call, n)
    release = workers.coordinator.budget.release

    def checked(owner: str, count: int) -> None:
        assert [len(driver.mapped) for driver in workers.drivers] == [0, 0], "the ledger was first"
        release(owner, count)

    workers.coordinator.budget.release = checked  # type: ignore[method-assign]
    with pytest.raises(PageGrowthRefused):
        workers.coordinator.wake()
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(1, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_cannot_be_filled_leave_all_asleep(rank):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.models[rank].fault = fail_nth("restore", 1, OSError)
    with pytest.raises(PageGrowthRefused) as caught:
        workers.coordinator.wake()
    assert caught.value.reason == "weights"
    workers.check(0, False)
    workers.coordinator.wake()
    workers.check(1, True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["unmap", "release_page"])
@pytest.mark.parametrize("n", [1, 6])
def test_rule_45_a_sleep_that_does_not_give_back_is_fatal(rank, call, n):
    workers = Workers()
    workers.drivers[rank].fault = fail_nth(call, n)
    with pytest.raises(MemoryOwnershipLost):
        workers.coordinator.sleep(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rule_45_a_wake_up_whose_rollback_fails_is_fatal(rank):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.models[1 - rank].fault = fail_nth("restore", 1)
    workers.drivers[rank].fault = fail_nth("release_page", 1)
    with pytest.raises(MemoryOwnershipLost):
        workers.coordinator.wake()


@pytest.mark.parametrize("verb", LOSSES)
@pytest.mark.parametrize("way", ["lose_call", "lose_answer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rules_44_and_45_calls_and_answers_that_are_lost(verb, way, rank):
    workers = Workers()
    sleeping = "wake" in verb
    if sleeping:
        workers.coordinator.sleep(1)
    setattr(workers.wires[rank], way, fail_nth(verb, 1, TimeoutError))
    expected = MemoryOwnershipLost if LOSSES[verb] else (PageGrowthRefused if sleeping else SleepFailed)
    with pytest.raises(expected):
        workers.coordinator.wake() if sleeping else workers.coordinator.sleep(1)
    if not LOSSES[verb]:
        workers.check(0 if sleeping else 1, not sleeping)
        workers.coordinator.sleep(1)
        workers.coordinator.wake()
        workers.check(1, True)


@pytest.mark.parametrize("way", ["lose_call", "lose_answer"])
def test_rule_45_an_abort_that_is_not_acknowledged_is_fatal(way):
    workers = Workers()
    workers.coordinator.sleep(1)
    workers.models[0].fault = fail_nth("restore", 1)
    setattr(workers.wires[1], way, fail_nth("abort", 1, TimeoutError))
    with pytest.raises(MemoryOwnershipLost, match="after a failed"):
        workers.coordinator.wake()
    assert workers.coordinator.budget.reserved(WEIGHTS_TAG) == 5, "the reservation stays with what is unknown"


def test_rules_28_and_40_a_wake_up_asks_for_memory_as_growth_does():
    workers = Workers()
    workers.coordinator.sleep(1)
    driver = workers.drivers[1]
    driver.outside = driver.total - (WEIGHT_PAGES[1] + LAYOUT.num_regions) * GRANULE + 1
    created = driver.calls.count("create_page")
    with pytest.raises(PageGrowthRefused) as caught:
        workers.coordinator.wake()
    assert caught.value.reason == "memory"
    assert driver.calls.count("create_page") == created
    workers.check(0, False)
    driver.outside -= 1
    workers.coordinator.wake()
    workers.check(1, True)


def test_everything_goes_back_in_the_end_from_any_state():
    for state in ("awake", "asleep", "half way"):
        workers = Workers()
        if state != "awake":
            workers.coordinator.sleep(1)
        for resources, driver in zip(workers.resources, workers.drivers):
            if state == "half way":
                resources.residency.prepare_wake(9, ["weights", "kv_cache"])
            resources.close()
            assert (driver.pages, driver.mapped, driver.ranges) == ({}, {}, {})
