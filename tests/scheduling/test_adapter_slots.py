"""Requests with adapters: no more of them in a step than there are slots, none starved, none with another's KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output
from xllm_npu.scheduling.adapter_slots import AdapterSlots
from xllm_npu.state.messages import sequence_key

PROMPT = [5, 6, 7, 8, 9]
COUNT = 4


def driver_with(adapters: int, **options) -> Driver:
    driver = Driver(**{"max_loras": 1, "starve_seconds": 1e9, **options})
    for lora_id in range(1, adapters + 1):
        driver.scheduler.add_lora(lora_id)
    return driver


def add(driver: Driver, request_id: int, lora_id: int = 0, prompt=PROMPT, **params) -> None:
    driver.scheduler.add(add_request(request_id, prompt, lora_id=lora_id, **{"max_tokens": COUNT, **params}))


def ends(driver: Driver) -> list[int]:
    driver.run()
    return [key // 256 for key in driver.finished]


def test_adapters_take_turns_and_others_run_beside_them():
    driver = driver_with(2)
    add(driver, 1, lora_id=1)
    add(driver, 2, lora_id=2)
    add(driver, 3)
    add(driver, 4, lora_id=1)
    driver.step()
    assert driver.scheduler.running.num_running == 3
    driver.scheduler.update_gauges()
    assert (driver.scheduler.stats.running_loras, driver.scheduler.stats.waiting_loras) == ([1], [2])
    assert ends(driver)[-1] == 2
    for request_id, adapter in ((1, 1), (2, 2), (3, 0), (4, 1)):
        assert driver.output(request_id) == expected_output(PROMPT, COUNT, 1000, adapter=adapter)


def test_who_waits_long_for_a_slot_is_not_overtaken_any_more():
    driver = driver_with(2, starve_seconds=0.0)
    add(driver, 1, lora_id=1, max_tokens=8)
    driver.step()
    add(driver, 2, lora_id=2)
    driver.step()
    for request_id in range(3, 8):  # they would keep the slot
        add(driver, request_id, lora_id=1)
        driver.step()
    add(driver, 8)  # needs no slot
    order = ends(driver)
    assert order.index(2) < order.index(3)
    assert order.index(8) < order.index(2)


def test_an_online_request_takes_the_slot_of_offline_ones():
    driver = driver_with(2)
    for request_id in range(1, 4):
        add(driver, request_id, lora_id=1, offline=True, max_tokens=60)
    driver.step()
    add(driver, 9, lora_id=2)
    order = ends(driver)
    assert order[0] == 9
    assert driver.scheduler.stats.preemptions_total >= 3
    assert driver.output(1) == expected_output(PROMPT, 60, 1000, adapter=1)


def test_siblings_share_the_slot():
    driver = driver_with(2)
    add(driver, 1, lora_id=1, n=3)
    add(driver, 2, lora_id=2)
    driver.run()
    assert driver.output(1, 2) == expected_output(PROMPT, COUNT, 1000, 2, adapter=1)


def test_an_adapter_that_is_not_loaded_is_refused():
    driver = driver_with(1)
    add(driver, 1, lora_id=2)
    driver.run()
    assert "not loaded" in driver.finished[sequence_key(1, 0)].message


def test_when_the_one_who_claims_a_slot_leaves_the_others_go_on():
    driver = driver_with(2, starve_seconds=0.0)
    add(driver, 1, lora_id=1, max_tokens=40)
    driver.step()
    add(driver, 2, lora_id=2)
    add(driver, 3, lora_id=1)
    driver.step()
    assert driver.scheduler.running.num_running == 1
    driver.abort([sequence_key(2, 0)])
    driver.step()
    assert driver.scheduler.running.num_running == 2
    driver.run()


def test_the_least_recently_used_makes_room():
    slots = AdapterSlots(2)
    for lora_id in (1, 2, 3):
        slots.add(lora_id)
    first, second = slots.take(1), slots.take(2)
    assert not slots.can_take(3)
    slots.give(2)
    slots.give(1)
    assert slots.take(1) == first  # where it was, and the last in use now
    slots.give(1)
    assert slots.take(3) == second
    assert slots.take_loads() == [(first, 1), (second, 2), (second, 3)]
    slots.give(3)
    slots.forget(3)
    slots.check_integrity()
    assert slots.can_take(2)


def test_what_is_unloaded_before_workers_heard_of_it_is_not_asked_for():
    slots = AdapterSlots(1)
    slots.add(1)
    slots.take(1)
    slots.give(1)
    slots.forget(1)
    assert slots.take_loads() == []
    slots.add(2)
    slots.take(2)
    with pytest.raises(AssertionError):
        slots.forget(2)


REQUESTS = st.lists(st.tuples(
    st.integers(0, 4),  # adapter
    st.integers(1, 14),  # prompt
    st.booleans(),  # offline
    st.integers(0, 3),  # steps before the next one
    st.sampled_from(["run", "run", "run", "abort", "unload"])), min_size=1, max_size=14)


@given(REQUESTS, st.integers(1, 3), st.booleans(), st.sampled_from([0.0, 1e9]), st.sampled_from([9, 24]))
@settings(max_examples=60, deadline=None)
def test_any_order_of_requests(requests, max_loras, overlap, starve_seconds, num_blocks):
    driver = driver_with(4, max_loras=max_loras, overlap=overlap, starve_seconds=starve_seconds, num_blocks=num_blocks,
                         max_model_len=32, max_tokens=8)
    scheduler, newest, expected = driver.scheduler, {i: i for i in range(1, 5)}, {}
    for request_id, (adapter, length, offline, steps, then) in enumerate(requests, 1):
        lora_id, prompt = newest.get(adapter, 0), list(range(length))
        add(driver, request_id, lora_id, prompt, offline=offline)
        expected[request_id] = expected_output(prompt, COUNT, 1000, adapter=lora_id)
        for _ in range(steps):
            driver.step()
            scheduler.check_integrity()
            assert len(scheduler.running.adapters.running) <= max_loras
        if then == "abort":
            driver.abort([sequence_key(request_id, 0)])
        elif then == "unload" and lora_id and not scheduler.uses_lora(lora_id) and not driver.queue:
            scheduler.forget_lora(lora_id)
            driver.worker.unloaded.add(lora_id)
            newest[adapter] = lora_id + 100
            scheduler.add_lora(lora_id + 100)
    driver.run()
    for request_id, tokens in expected.items():
        if sequence_key(request_id, 0) not in driver.aborted:
            assert driver.output(request_id) == tokens
    assert not scheduler.running.adapters.running
