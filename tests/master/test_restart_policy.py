"""How often a failing engine is started again."""

from xllm_npu.master.restart_policy import LONGEST_PAUSE, WINDOW_SECONDS, RestartPolicy


def test_at_once_then_later_then_no_more():
    policy = RestartPolicy(3)
    assert [policy.next_pause(100.0) for _ in range(5)] == [0.0, 1.0, 3.0, None, None]


def test_old_restarts_are_forgotten():
    policy = RestartPolicy(1)
    assert policy.next_pause(0.0) == 0.0
    assert policy.next_pause(WINDOW_SECONDS) is None
    assert policy.next_pause(WINDOW_SECONDS + 1) == 0.0


def test_bounds():
    assert RestartPolicy(0).next_pause(0.0) is None
    patient = RestartPolicy(50)
    assert [patient.next_pause(0.0) for _ in range(50)][-1] == LONGEST_PAUSE
