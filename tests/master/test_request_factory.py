"""What comes through the door fits the engine; what does not is refused with the numbers."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from xllm_npu.master.request_factory import GenerationInput, RequestFactory
from xllm_npu.state.messages import EngineReady
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams
from xllm_npu.text.tokenizer import Tokenizer

INFO = EngineReady(
    model_name="m", architecture="A", platform="cpu", device="cpu", dtype="float32", vocab_size=300, max_model_len=64,
    eos_token_ids=[2], num_kv_blocks=100, block_size=16, max_seqs=8, max_tokens_per_batch=32, weight_bytes=0,
    kv_cache_bytes=0, graph_sizes=[], load_seconds=0.0, chunked_prefill=True)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Bytes, and the one merge that makes " f" a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*alphabet, "Ġf"])}
    backend = Backend(models.BPE(vocab, [("Ġ", "f")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Tokenizer(path)


@pytest.fixture
def make(tokenizer):
    """make(prompt length or ids, info=..., input fields..., **sampling parameters) -> AddRequest"""
    inputs = {f for f in GenerationInput.__dataclass_fields__ if f not in ("prompt_token_ids", "params")}
    factories: dict[int, RequestFactory] = {}

    def make(prompt, info=INFO, max_logprobs=20, **fields):
        factory = factories.setdefault(id(info), RequestFactory(tokenizer, info, max_logprobs))
        ids = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
        params = SamplingParams(**{k: v for k, v in fields.items() if k not in inputs})
        mine = {k: v for k, v in fields.items() if k in inputs}
        return factory.make(GenerationInput(prompt_token_ids=ids, params=params, **mine))

    return make


def test_carries_everything_over(make):
    request = make(3, external_id="cmpl-1", priority=-2, ttft_slo_ms=1, tpot_slo_ms=2, ttlt_slo_ms=3, cache_salt="s",
                   arrival_time=5.0, temperature=0.5, stop=("x",))  # fmt: skip
    assert request.prompt_token_ids.tolist() == [10, 11, 12]
    assert (request.external_id, request.priority, request.cache_salt) == ("cmpl-1", -2, "s")
    assert (request.ttft_slo_ms, request.tpot_slo_ms, request.ttlt_slo_ms) == (1, 2, 3)
    assert (request.arrival_time, request.offline) == (5.0, False)
    assert (request.params.temperature, request.params.stop) == (0.5, ("x",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request


def test_ids_are_never_given_twice(make):
    ids = [make(1).request_id for _ in range(5)]
    assert len(set(ids)) == 5
    assert min(ids) > 0


def test_numpy_prompt(make):
    assert make(np.array([1, 2], np.int32)).prompt_token_ids.tolist() == [1, 2]


def test_offline_requests_have_no_deadlines(make):
    request = make(1, offline=True, ttft_slo_ms=1, tpot_slo_ms=2, ttlt_slo_ms=3)
    assert (request.offline, request.ttft_slo_ms, request.tpot_slo_ms, request.ttlt_slo_ms) == (True, 0, 0, 0)


@pytest.mark.parametrize(("prompt", "max_tokens", "expected"), [
    (10, None, 54), (10, 7, 7), (10, 54, 54), (10, 1000, 54), (63, None, 1),
])  # fmt: skip
def test_max_tokens_default_and_clamp(make, prompt, max_tokens, expected):
    assert make(prompt, max_tokens=max_tokens).params.max_tokens == expected


@pytest.mark.parametrize(("keep", "side", "max_tokens", "expected"), [
    (3, "left", None, [97, 98, 99]),
    (3, "right", None, [10, 11, 12]),
    (200, "left", None, None),
    (-1, "left", 4, list(range(40, 100))),
    (-1, "right", None, list(range(10, 73))),
])  # fmt: skip
def test_truncation(make, keep, side, max_tokens, expected):
    def run():
        return make(90, truncate_prompt_tokens=keep, truncation_side=side, max_tokens=max_tokens)

    if expected is None:
        with pytest.raises(InvalidParameter, match=r"\[1, 64\], got 200"):
            run()
    else:
        assert run().prompt_token_ids.tolist() == expected


UNCHUNKED = msgspec.structs.replace(INFO, chunked_prefill=False)
SMALL = msgspec.structs.replace(INFO, num_kv_blocks=2)  # 32 tokens


def test_capacity_limits_the_default_of_max_tokens(make):
    assert make(10, info=SMALL).params.max_tokens == 22
    assert make(10, info=SMALL, max_tokens=22).params.max_tokens == 22


@pytest.mark.parametrize(("prompt", "fields", "param", "says"), [
    ([], {}, "prompt", "empty"),
    ([], {"prompt_param": "messages"}, "messages", "empty"),
    ([1, 300], {}, "prompt", r"token id 300.*\(0 to 299\)"),
    ([-1], {}, "prompt", "token id -1"),
    ([2**70], {}, "prompt", "token id"),
    ([1.5], {}, "prompt", "flat list"),
    ([[1, 2], [3]], {}, "prompt", "flat list"),
    (64, {}, "prompt", "This model's maximum context length is 64 tokens. However, your prompt has 64 tokens"),
    (33, {"info": UNCHUNKED}, "prompt", "33 tokens.*at most 32 tokens"),
    (32, {"info": SMALL}, "prompt", r"32 tokens.*KV cache holds 32 \(2 blocks of 16\)"),
    (10, {"info": SMALL, "max_tokens": 23}, "max_tokens", "need 3 KV blocks, and the server has 2.*at most 22"),
    (60, {"min_tokens": 5}, "min_tokens", "min_tokens is 5, but a prompt of 60 tokens leaves room for 4"),
    (1, {"cache_salt": "x" * 129}, "cache_salt", "128 characters at most, got 129"),
    (1, {"truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
    (1, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0"),
    (1, {"ttft_slo_ms": -1}, "ttft_slo_ms", "got -1"),
    (1, {"priority": 2**40}, "priority", "priority must be"),
    (1, {"stop": ("x" * 1025,)}, "stop", "1024 characters"),
    (1, {"stop": ("x",), "detokenize": False}, "stop", "detokenize"),
    (1, {"temperature": 3.0}, "temperature", "temperature must be"),
    (1, {"stop_token_ids": (300,)}, "stop_token_ids", "300"),
    (1, {"bad_words": ("  ",)}, "bad_words", "no tokens of its own"),
    (1, {"bad_words_token_ids": ((300,),)}, "bad_words_token_ids", "0 to 299"),
    (1, {"bad_words_token_ids": ((),)}, "bad_words_token_ids", "lists of token ids"),
    (1, {"external_id": "x" * 257}, "request_id", "256"),
])  # fmt: skip
def test_refusals_name_the_field_and_the_numbers(make, prompt, fields, param, says):
    with pytest.raises(InvalidParameter, match=says) as e:
        make(prompt, **fields)
    assert e.value.param == param


def test_the_largest_that_fits_is_taken(make):
    assert make(63).prompt_token_ids.size == 63
    assert make(32, info=UNCHUNKED).prompt_token_ids.size == 32
    assert make(31, info=SMALL).params.max_tokens == 1
    assert make(1, cache_salt="x" * 128, stop=("x" * 1024,))


def test_logprobs_limit_of_the_server(make):
    assert make(1, max_logprobs=3, logprobs=3).params.logprobs == 3
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidParameter, match=r"at most 3.*got 4") as e:
            make(1, max_logprobs=3, **{name: 4})
        assert e.value.param == name


def test_bad_words_with_and_without_a_blank(make, tokenizer):
    a, f, blank_f, blank = (tokenizer.encode(t)[0] for t in ("a", "f", " f", " "))
    assert make(1, bad_words=("f", " a")).params.bad_words_token_ids == ((f,), (blank_f,), (a,), (blank, a))
    both = make(1, bad_words=("f",), bad_words_token_ids=((7, 8),)).params.bad_words_token_ids
    assert both == ((7, 8), (f,), (blank_f,))


def test_bad_words_the_model_has_no_tokens_for_are_left_out(make):
    info = msgspec.structs.replace(INFO, vocab_size=256)  # the tokenizer has one token more
    assert len(make(1, info=info, bad_words=("f",)).params.bad_words_token_ids) == 1


def test_best_of_asks_for_the_logprobs_it_chooses_by(make):
    assert make(1, n=1, best_of=3).params.logprobs == 0
    assert make(1, n=1, best_of=3, logprobs=2).params.logprobs == 2
    assert make(1, n=3, best_of=3).params.logprobs is None


def test_the_callers_parameters_are_left_alone(tokenizer):
    params = SamplingParams(bad_words=("f",))
    before = replace(params)
    RequestFactory(tokenizer, INFO).make(GenerationInput(prompt_token_ids=[1], params=params))
    assert params == before
