"""Ranges of request fields, by the name the API gives them, and what is taken for a list."""

import msgspec
import pytest

from xllm_npu.state.repetition import RepetitionDetection
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams


@pytest.mark.parametrize(("values", "param"), [
    ({"n": 0}, "n"), ({"n": 2, "best_of": 1}, "best_of"), ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"), ({"min_p": 1.5}, "min_p"), ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"), ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"), ({"stop": ("",)}, "stop"), ({"stop": ("x",) * 17}, "stop"),
    ({"logprobs": 21}, "logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logit_bias": {5: 101.0}}, "logit_bias"), ({"logit_bias": {100: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": ()}, "allowed_token_ids"),
    ({"allowed_token_ids": (100,)}, "allowed_token_ids"), ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"bad_words": ("",)}, "bad_words"), ({"stream_interval": 0}, "stream_interval"),
    ({"length_penalty": 2.0}, "length_penalty"), ({"use_beam_search": True, "length_penalty": 11.0}, "length_penalty"),
    ({"use_beam_search": True, "n": 51}, "n"), ({"use_beam_search": True, "best_of": 51}, "best_of"),
    ({"use_beam_search": True, "stop": "x"}, "stop"), ({"use_beam_search": True, "bad_words": "x"}, "bad_words"),
    ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"use_beam_search": True, "logit_bias": {1: 1.0}}, "logit_bias"),
    ({"repetition_detection": RepetitionDetection(max_pattern_size=3)}, "repetition_detection"),
    ({"repetition_detection": RepetitionDetection(max_pattern_size=513, min_count=2)}, "repetition_detection"),
    ({"repetition_detection": RepetitionDetection(min_pattern_size=4, max_pattern_size=3, min_count=2)},
     "repetition_detection"),
])
def test_out_of_range_names_the_field(values, param):
    with pytest.raises(InvalidParameter) as raised:
        SamplingParams(**values).check(vocab_size=100)
    assert raised.value.param == param
    assert param in raised.value.message


def test_the_edges_are_in_range():
    SamplingParams(n=128, temperature=2.0, top_p=1.0, top_k=-1, min_p=1.0, presence_penalty=-2.0, seed=-(2**63),
                   logprobs=20, logit_bias={99: -100.0}, allowed_token_ids=(0, 99)).check(vocab_size=100)


def test_the_width_is_bounded_without_a_vocabulary_too():
    SamplingParams(use_beam_search=True, n=64, temperature=0.0, top_k=5, length_penalty=-10.0).check()
    with pytest.raises(InvalidParameter, match="at most 64, got 65"):
        SamplingParams(use_beam_search=True, n=65).check()


def test_lists_and_single_strings_become_tuples():
    params = SamplingParams(stop="END", bad_words=["a", "b"], stop_token_ids=[1, 2], allowed_token_ids=[3])
    assert (params.stop, params.bad_words) == (("END",), ("a", "b"))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((1, 2), (3,))
    assert hash(params.stop)


def test_it_survives_the_wire():
    params = SamplingParams(temperature=0.5, stop=("x",), logit_bias={7: 1.5}, allowed_token_ids=(1, 2), seed=3,
                            repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
