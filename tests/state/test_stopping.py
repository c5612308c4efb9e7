"""The plain stopping rule, and that the scheduler's vectorised one agrees with it on random streams."""

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output
from xllm_npu.state.messages import FINISH_LENGTH, FINISH_STOP, sequence_key
from xllm_npu.state.sampling_params import SamplingParams
from xllm_npu.state.stopping import StoppingChecker, max_total_tokens, stop_token_ids


def checker(**params):
    return StoppingChecker(SamplingParams(**params), 10, 100, (2,))


def test_eos_stop_ids_and_length():
    assert checker(max_tokens=5).check(11, 2) == FINISH_STOP
    assert checker(max_tokens=5, ignore_eos=True).check(11, 2) is None
    assert checker(max_tokens=5, stop_token_ids=(7,)).check(11, 7) == FINISH_STOP
    assert checker(max_tokens=5).check(15, 3) == FINISH_LENGTH
    assert checker(max_tokens=5).check(14, 3) is None
    assert checker(max_tokens=5).check(15, 2) == FINISH_STOP, "a stop token wins over the length"
    assert checker(max_tokens=5, min_tokens=3).check(12, 2) is None
    assert checker(max_tokens=5, min_tokens=3).check(13, 2) == FINISH_STOP
    assert checker(max_tokens=500).check(100, 3) == FINISH_LENGTH
    assert max_total_tokens(SamplingParams(), 10, 100) == 100
    assert stop_token_ids(SamplingParams(stop_token_ids=(5, 2)), (2, 3)) == [5, 2, 3]


@settings(max_examples=150, deadline=None)
@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8), max_tokens=st.integers(1, 30),
       stops=st.sets(st.integers(0, 19), max_size=12), eos=st.sets(st.integers(0, 19), max_size=2),
       ignore=st.booleans(), overlap=st.booleans())
def test_the_scheduler_stops_where_the_plain_rule_does(prompt, max_tokens, stops, eos, ignore, overlap):
    params = {"max_tokens": max_tokens, "stop_token_ids": tuple(sorted(stops)), "ignore_eos": ignore}
    plain = StoppingChecker(SamplingParams(**params), len(prompt), 32, tuple(eos))
    wanted, reason = [], None
    for token in expected_output(prompt, 40, 20):
        wanted.append(token)
        reason = plain.check(len(prompt) + len(wanted), token)
        if reason is not None:
            break
    driver = Driver(overlap, vocab=20, max_model_len=32, eos_token_ids=tuple(eos))
    driver.scheduler.add(add_request(1, prompt, **params))
    driver.run()
    assert driver.output(1) == wanted
    assert driver.finished[sequence_key(1, 0)].reason == reason
