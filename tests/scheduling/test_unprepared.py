"""Requests that are open and not scheduled yet, as what they need is being made."""

import pytest

from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output
from xllm_npu.state.messages import FINISH_ABORT, FINISH_ERROR, sequence_key

PROMPT = [5, 6, 7]


@pytest.fixture
def driver() -> Driver:
    return Driver()


def add(driver: Driver, request_id: int, prepared: bool = False, **params) -> None:
    driver.scheduler.add(add_request(request_id, PROMPT, max_tokens=4, **params), prepared)


def idle(driver: Driver) -> bool:
    """Nothing is scheduled, and the books agree."""
    driver.scheduler.check_integrity()
    return driver.scheduler.schedule() is None


def test_it_runs_when_it_is_prepared_and_not_before(driver):
    add(driver, 1)
    assert driver.scheduler.has_work
    assert idle(driver)
    driver.scheduler.update_gauges()
    assert driver.scheduler.stats.waiting == 1
    assert not driver.scheduler.stalled
    driver.scheduler.set_prepared(1)
    driver.run()
    assert driver.output(1) == expected_output(PROMPT, 4, 1000)


def test_others_run_meanwhile(driver):
    add(driver, 1)
    add(driver, 2, prepared=True)
    while driver.scheduler.stats.running or sequence_key(2, 0) not in driver.finished:
        driver.step()
    assert sequence_key(1, 0) not in driver.tokens
    assert idle(driver)


def test_one_that_cannot_be_prepared_ends_with_the_reason(driver):
    add(driver, 1, n=3)
    driver.scheduler.abort([sequence_key(1, 1)])
    driver.scheduler.set_prepared(1, "It cannot.")
    driver.run()
    assert {k: (f.reason, f.message) for k, f in driver.finished.items()} == {
        sequence_key(1, i): (FINISH_ERROR, "It cannot.") for i in (0, 2)}


@pytest.mark.parametrize("leaves", [[0], [1], [2, 0], [0, 1], [0, 1, 2]])
def test_sequences_may_leave_before(driver, leaves):
    add(driver, 1, n=3)
    for index in leaves:
        driver.abort([sequence_key(1, index)])
        assert idle(driver)
    driver.scheduler.set_prepared(1)
    driver.scheduler.set_prepared(1)  # again is harmless
    driver.run()
    assert set(driver.tokens) == {sequence_key(1, i) for i in range(3) if i not in leaves}


def test_a_pause_ends_it_or_keeps_it_or_lets_it_finish(driver):
    s = driver.scheduler
    add(driver, 1)
    s.pause("abort")
    assert s.quiet
    assert [f.reason for f in s.pending_outputs().finished] == [FINISH_ABORT]
    s.set_prepared(1)
    s.resume()
    add(driver, 2)
    s.pause("keep")
    assert s.quiet
    s.set_prepared(2)
    assert idle(driver)
    s.resume()
    driver.run()
    assert len(driver.output(2)) == 4
    add(driver, 3)
    s.pause("wait")
    assert not s.quiet
    add(driver, 4)  # too late to finish before the pause
    s.set_prepared(4)
    s.check_integrity()
    s.set_prepared(3)
    while sequence_key(3, 0) not in driver.finished:
        driver.step()
    assert s.quiet
    s.resume()
    driver.run()
    assert len(driver.output(4)) == 4


def test_one_that_came_during_a_pause_is_prepared_after_it(driver):
    s = driver.scheduler
    add(driver, 1, prepared=True)
    s.pause("wait")
    add(driver, 2)
    s.resume()
    s.set_prepared(2)
    driver.run()
    assert len(driver.output(2)) == 4
