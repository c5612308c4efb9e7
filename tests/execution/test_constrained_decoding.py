"""The parts of decoding under a grammar: the mask's operator, its place among the processors, matchers by row."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xllm_models.ops import cpu_ops, torch_ops

from tests.support.tiny_tokenizer import EOS, byte_tokenizer
from xllm_npu.execution.constrained_decoding import ConstrainedDecoding, GrammarMask
from xllm_npu.execution.grammar_cache import MAX_GRAMMARS, GrammarCache, PreparedRequests
from xllm_npu.execution.sampler import Sampler
from xllm_npu.execution.sampling_state import SamplingState
from xllm_npu.execution.step_message import StepInput
from xllm_npu.state.batch import RowAdmission
from xllm_npu.state.output import GRAMMAR_TOO_COMPLEX
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams
from xllm_npu.text import structured_output
from xllm_npu.text.grammar_matcher import MatcherFactory

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_to_id(EOS)
CPU = torch.device("cpu")
NONE = np.zeros(0, np.int32)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def packed(allowed: list[list[int]], vocab: int) -> torch.Tensor:
    """[G, words] int32"""
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), np.uint8)
    for row, tokens in zip(bits, allowed):
        row[tokens] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return MatcherFactory(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [EOS_ID])


@pytest.fixture
def constrained(factory):
    made = ConstrainedDecoding(GrammarCache(lambda: factory), 8, CPU, torch_ops.token_bitmask)
    yield made
    made.close()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), vocab=st.integers(1, 300), spare=st.integers(0, 2))
def test_the_mask_forbids_what_its_bits_do_not_allow(seed, vocab, spare):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(5, vocab)).astype(np.float32))
    rows = rng.permutation(5)[: rng.integers(1, 6)].tolist()
    allowed = [np.flatnonzero(rng.uniform(size=vocab) < 0.5).tolist() for _ in rows]
    expected = logits.clone()
    for row, tokens in zip(rows, allowed):
        expected[row] = -torch.inf
        expected[row, tokens] = logits[row, tokens]
    mask = torch.cat([packed(allowed, vocab), torch.full((len(rows), spare), -1, dtype=torch.int32)], 1)
    cpu_ops.token_bitmask(logits, mask, torch.tensor(rows, dtype=torch.int32))
    assert torch.equal(logits, expected)


def sample(params: list[SamplingParams], allowed: dict[int, list[int]], logits: torch.Tensor) -> tuple[list, list]:
    state = SamplingState(8, logits.shape[1], "cpu")
    for row, p in enumerate(params):
        state.admit(row, p, [0], NONE, NONE)
    mask = GrammarMask(np.array([*allowed], np.int64), packed([*allowed.values()], logits.shape[1]),
                       torch_ops.token_bitmask)
    rows = np.arange(len(params), dtype=np.int32)
    found = Sampler(state).sample(logits.clone(), rows, np.zeros_like(rows), mask).to_host()
    return found.tokens.tolist(), found.bad_rows.tolist()


GREEDY = {"temperature": 0.0}


def test_rows_choose_among_what_their_grammar_allows():
    logits = torch.arange(10, dtype=torch.float32).repeat(4, 1)
    params = [SamplingParams(**GREEDY), SamplingParams(**GREEDY), SamplingParams(temperature=1.0, seed=1),
              SamplingParams(**GREEDY, logprobs=2)]
    assert sample(params, {1: [2, 4], 2: [3], 3: [5, 1]}, logits) == ([9, 4, 3, 5], [False] * 4)


def test_what_forbids_tokens_never_empties_a_row():
    logits = torch.arange(10, dtype=torch.float32).repeat(6, 1)
    params = [
        SamplingParams(**GREEDY, min_tokens=5), SamplingParams(**GREEDY, min_tokens=5),
        SamplingParams(**GREEDY, allowed_token_ids=(7, 8)), SamplingParams(**GREEDY, allowed_token_ids=(1, 2)),
        SamplingParams(**GREEDY, bad_words_token_ids=((3,), (4,))),
        SamplingParams(temperature=1.0, allowed_token_ids=(9,), logit_bias={3: 100.0}),
    ]  # fmt: skip
    allowed = {0: [0], 1: [0, 2], 2: [1, 2], 3: [2, 5], 4: [3, 4], 5: [3, 4]}
    #                stop, all there is; not stop; neither is allowed; one is; both are bad; bias is no mask
    assert sample(params, allowed, logits) == ([0, 2, 2, 2, 4, 3], [False] * 6)


def test_a_row_whose_allowed_logits_are_not_numbers_is_bad():
    logits = torch.arange(4, dtype=torch.float32).repeat(2, 1)
    logits[:, 2] = torch.nan
    assert sample([SamplingParams(**GREEDY)] * 2, {0: [2], 1: [1]}, logits) == ([0, 1], [True, False])


def test_matchers_follow_their_rows(constrained):
    """Rows come, are sampled in any order, some of them, and go."""
    constrained.admit(3, structured_output.regex("ab+"), NONE)
    constrained.admit(5, structured_output.regex("xyz"), int32(*ids("x")))  # was preempted after its first token
    a, b, y, z = (ids(c)[0] for c in "abyz")

    def step(rows: list[int], tokens: list[int]) -> dict[int, str]:
        constrained.begin(int32(*rows))
        mask = constrained.mask()
        logits = torch.zeros(len(rows), TOKENIZER.get_vocab_size())
        if mask is not None:
            mask.apply(logits)
        for row, token in zip(rows, tokens):
            if row in (3, 5):
                assert logits[rows.index(row), token] == 0, "the token should be allowed"
                assert logits[rows.index(row)].isinf().any()
            else:
                assert not logits[rows.index(row)].isinf().any()
        return constrained.accept(int32(*tokens))

    assert step([0, 5, 3], [1, y, a]) == {}
    assert step([3, 1], [b, 1]) == {}
    assert step([0], [1]) == {}
    assert step([5, 3], [z, EOS_ID]) == {}
    assert step([3, 5], [EOS_ID, EOS_ID]) == {}  # a step that was scheduled before the last end was known
    constrained.release(3)
    constrained.release(7)
    constrained.begin(int32(3))
    assert constrained.mask() is None
    constrained.admit(3, structured_output.regex("ab+"), NONE)
    assert step([3], [a]) == {}


def test_a_matcher_that_fails_is_told_of_and_disturbs_no_other(constrained):
    constrained.admit(0, structured_output.regex("aa"), NONE)
    constrained.admit(1, structured_output.regex("aa"), NONE)
    a, b = ids("a")[0], ids("b")[0]
    constrained.begin(int32(0, 1))
    constrained.mask()
    assert constrained.accept(int32(b, a)) == {0: GRAMMAR_TOO_COMPLEX}
    constrained.begin(int32(0, 1))
    assert constrained.mask() is not None
    assert constrained.accept(int32(a, a)) == {0: GRAMMAR_TOO_COMPLEX}


def test_requests_wait_for_their_grammars(factory):
    may_load = threading.Event()
    cache = GrammarCache(lambda: factory if may_load.wait(60) else None)
    requests = PreparedRequests(cache)
    good, bad = structured_output.regex("a"), structured_output.lark("start: nothing")
    assert not requests.add(1, good)
    assert not requests.add(2, bad)
    assert requests.take_done() == []
    may_load.set()
    found: dict[int, str] = {}
    while len(requests):
        found.update(requests.take_done(1.0))
    assert found[1] == ""
    assert "nothing" in found[2]
    assert requests.add(3, good)  # it is there now
    assert not requests.add(4, bad)  # and that failed is not remembered
    cache.close()


def test_old_grammars_are_forgotten_and_can_come_again(factory):
    cache = GrammarCache(lambda: factory)
    first = structured_output.regex("a")
    cache.matcher(first)
    for i in range(MAX_GRAMMARS):
        cache.prepare(structured_output.regex(f"a{i}"))
    assert first not in cache._compiled
    assert len(cache._compiled) == MAX_GRAMMARS
    assert cache.matcher(first).consume_tokens(ids("a"))
    cache.close()


def test_a_model_that_cannot_have_grammars_says_so():
    def load():
        raise ValueError("The tokenizer is of no kind that is known.")

    cache = GrammarCache(load)
    requests = PreparedRequests(cache)
    requests.add(1, structured_output.regex("a"))
    [(_, reason)] = requests.take_done(5.0)
    assert "no kind" in reason
    cache.close()


def test_ranks_that_do_not_sample_get_no_grammars():
    admitted = [RowAdmission(row=i, sequence_index=0, params=SamplingParams(grammar=g), stop_ids=[], output=b"1234")
                for i, g in enumerate([None, "{}"])]
    step = StepInput(step_id=1, num_decodes=0, rows=b"", start=b"", num_new=b"", tokens=b"", block_table=b"",
                     table_width=1, sample_source=b"", sample_rows=b"", sample_output=b"", admitted=admitted)
    plain = step.without_grammars()
    assert [a.params.grammar for a in plain.admitted] == [None, None]
    assert [a.output for a in plain.admitted] == [b"1234"] * 2
    assert step.admitted[1].params.grammar == "{}"
    assert plain.without_grammars() is plain


def test_beams_and_sizes_are_refused():
    with pytest.raises(InvalidParameter, match="grammar is not available with use_beam_search"):
        SamplingParams(grammar="{}", use_beam_search=True).check()
    with pytest.raises(InvalidParameter, match="at most"):
        SamplingParams(grammar="x" * (1 << 20) + "x").check()
