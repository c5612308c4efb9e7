"""The search over a scripted distribution: rules of scores, ends and thrift, each by hand."""

import math

from xllm_npu.master.beams import Beams
from xllm_npu.state.messages import Logprobs
from xllm_npu.state.sampling_params import SamplingParams

STOP, VOCAB = 9, range(10)


def row(**likely: float) -> Logprobs:
    """Probabilities by token, `t5=0.5`; the others are one in a million each; the likeliest first."""
    given = {int(name[1:]): p for name, p in likely.items()}
    tokens = sorted(VOCAB, key=lambda t: -given.get(t, 1e-6))
    values = [math.log(given.get(t, 1e-6)) for t in tokens]
    return Logprobs([tokens[0], *tokens], [values[0], *values], [1, *range(1, 11)])


def beams_of(width=2, num_prompt=4, stops=(STOP,), **params) -> Beams:
    return Beams(SamplingParams(use_beam_search=True, n=width, **{"max_tokens": 10, **params}), num_prompt, stops)


def paths(beams) -> list[list[int]]:
    return [beam.token_ids() for beam in beams]


def test_a_beam_may_have_two_heirs_and_another_none():
    beams = beams_of()
    beams.advance([row(t1=0.6, t2=0.4)])
    assert paths(beams.live) == [[1], [2]]
    beams.advance([row(t3=0.5, t4=0.5), row(t5=0.1, t6=0.1)])
    assert paths(beams.live) == [[1, 3], [1, 4]]
    assert beams.live[0].logprob == math.log(0.6) + math.log(0.5)


def test_a_score_counts_the_prompt_and_not_the_stop_token():
    beams = beams_of(length_penalty=1.0)
    beams.advance([row(t1=0.5, t9=0.4)])
    beams.advance([row(t2=0.5), row(t2=0.5)])
    ended = next(b for b in beams.best() if b.stop_token_id == STOP)
    assert beams.score(ended) == math.log(0.4) / 4
    assert beams.score(beams.live[0]) == (math.log(0.5) + math.log(0.5)) / (4 + 2)


def test_the_search_ends_once_nothing_better_can_come():
    for penalty, steps, best in ((0.0, 2, [9]), (1.0, 10, [1] * 10)):
        beams = beams_of(1, best_of=2, num_prompt=1, length_penalty=penalty)
        beams.advance([row(t1=0.5, t9=0.3)])
        taken = 1
        while not beams.done:
            beams.advance([row(t1=0.5, t2=0.3) for _ in beams.live])
            taken += 1
        assert (taken, paths(beams.best())) == (steps, [best])


def test_more_stop_ids_than_beams_leave_enough_to_go_on():
    beams = beams_of(2, stops=(5, 6, 7, 8, 9))
    beams.advance([row(t5=0.2, t6=0.2, t7=0.2, t8=0.2, t9=0.1, t1=0.05, t2=0.04)])
    assert paths(beams.live) == [[1], [2]]
    assert len(beams.best()) == 2
    assert not beams.done


def test_before_min_tokens_nothing_stops():
    beams = beams_of(2, min_tokens=1)
    beams.advance([row(t9=0.9, t1=0.05, t2=0.04)])
    assert paths(beams.best()) == [[1], [2]]
    beams.advance([row(t9=0.9), row(t9=0.9)])
    assert [b.stop_token_id for b in beams.best()] == [STOP, STOP]


def test_log_probabilities_as_the_client_wants_them():
    beams = beams_of(1, logprobs=1, logprob_token_ids=(8,))
    measured = row(t4=0.5, t3=0.3)
    asked = Logprobs([*measured.token_ids, 8], [*measured.logprobs, -9.0], [*measured.ranks, 5])
    beams.advance([asked])
    assert beams.live[0].measured.token_ids == [4, 4, 8]
    assert beams.live[0].measured.ranks == [1, 1, 5]
