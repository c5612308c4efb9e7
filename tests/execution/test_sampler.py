"""The sampler against a plain reference that treats one row at a time, and against transformers' warpers."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from xllm_npu.execution import sampler as sampler_module
from xllm_npu.execution.sampler import Sampler
from xllm_npu.execution.sampling_state import SamplingState, uniforms
from xllm_npu.state.sampling_params import SamplingParams

NONE = np.zeros(0, np.int32)
PLAIN = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# --- the plain reference


def reference_processed(
    logits: np.ndarray, p: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    x = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    if p.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -np.inf
    for word in p.bad_words_token_ids:
        begun = list(word[:-1])
        if not begun or output[-len(begun) :] == begun:
            x[word[-1]] = -np.inf
    if len(output) < p.min_tokens:
        x[[2, *p.stop_token_ids]] = -np.inf
    for t, value in p.logit_bias.items():
        x[t] += np.float32(value)
    for t in {*prompt, *output} if p.repetition_penalty != 1.0 else ():
        r = np.float32(p.repetition_penalty)
        x[t] = x[t] / r if x[t] > 0 else x[t] * r
    for t, n in Counter(output).items():
        x[t] -= np.float32(p.frequency_penalty) * np.float32(n)
        x[t] -= np.float32(p.presence_penalty)
    return x


def reference_weights(x: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k, top_p, in float64."""
    x = x / np.float32(p.temperature)
    with np.errstate(invalid="ignore"):
        w = np.exp(x.astype(np.float64) - float(x.max()))
    if p.min_p > 0:
        w[w < p.min_p * (1 - 1e-6)] = 0.0
    if 0 < p.top_k < len(w):
        w[w < np.sort(w)[-p.top_k]] = 0.0
    w /= w.sum()
    if p.top_p < 1:
        w = np.array([v if w[w > v].sum() < p.top_p else 0.0 for v in w])
        w /= w.sum()
    return w


def reference_draw(w: np.ndarray, pair: np.ndarray) -> int:
    """The two-stage draw: a block of 256 tokens, then a token of it."""
    blocks = [w[i : i + 256] for i in range(0, len(w), 256)]

    def pick(weights: list[float], u: float) -> int:
        running, total = 0.0, sum(weights)
        for i, value in enumerate(weights):
            running += value
            if running > u * total:
                return i
        return int(np.argmax(weights))

    b = pick([float(x.sum()) for x in blocks], float(pair[0]))
    return b * 256 + pick(blocks[b].tolist(), float(pair[1]))


# --- hypothesis


@st.composite
def param_mixes(draw: st.DrawFn, vocab: int) -> SamplingParams:
    token = st.integers(0, vocab - 1)
    maybe = st.booleans()
    words = st.lists(token, min_size=1, max_size=3).map(tuple)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 7, vocab, vocab * 3])),
        top_p=draw(st.sampled_from([1.0, 0.97, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        min_tokens=draw(st.integers(0, 6)),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2))),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3)),
        allowed_token_ids=tuple(draw(st.lists(token, min_size=1, max_size=30))) if draw(maybe) else None,
        bad_words_token_ids=tuple(draw(st.lists(words, max_size=3))),
        logprobs=draw(st.sampled_from([None, 0, 4])),
    )


@PLAIN
@given(data=st.data())
def test_any_mix_of_parameters_equals_the_plain_reference(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([40, 300]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = data.draw(st.integers(1, 5))
    params = [data.draw(param_mixes(vocab)) for _ in range(count)]
    rows = rng.permutation(8)[:count].astype(np.int32)
    state = SamplingState(8, vocab, "cpu")
    prompts = [rng.integers(0, vocab, 5).astype(np.int32) for _ in params]
    outputs = [rng.integers(0, vocab, rng.integers(0, 6)).astype(np.int32) for _ in params]
    for row, p, prompt, output in zip(rows, params, prompts, outputs):
        state.admit(int(row), p, (2,), prompt, output)
    num_output = np.array([len(o) for o in outputs], np.int32)
    logits = rng.normal(0, 3, (count, vocab)).astype(np.float32)
    result = Sampler(state, host_reads=data.draw(st.booleans())).sample(
        torch.from_numpy(logits.copy()), rows, num_output
    )
    host = result.to_host()
    pairs = uniforms(state.seed[rows], num_output)
    for i, p in enumerate(params):
        x = reference_processed(logits[i], p, prompts[i].tolist(), outputs[i].tolist())
        assert host.bad_rows[i] == np.isneginf(x).all()
        assert 0 <= host.tokens[i] < vocab
        if host.bad_rows[i]:
            continue
        if p.greedy:
            assert host.tokens[i] == x.argmax()
            continue
        w = reference_weights(x, p)
        assert w[host.tokens[i]] > 0
        # The reference sums in float64: a uniform within rounding of an edge may fall on either side.
        assert host.tokens[i] in {reference_draw(w, pairs[i] + d) for d in (-1e-6, 0.0, 1e-6)}
    asked = [int(row) for row, p in zip(rows, params) if p.logprobs is not None]
    assert asked == (host.logprobs.rows.tolist() if host.logprobs else [])


def kept_tokens(logits: torch.Tensor, params: SamplingParams, host_reads: bool) -> set[int]:
    """Tokens that many draws from one row give: 4096 rows of the same logits, each with its own seed."""
    count = 4096
    state = SamplingState(count, logits.shape[0], "cpu")
    for row in range(count):
        state.admit(row, params, (), NONE, NONE)
    rows = np.arange(count, dtype=np.int32)
    result = Sampler(state, host_reads).sample(
        logits.expand(count, -1).clone(), rows, np.zeros(count, np.int32)
    )
    return set(result.tokens.tolist())


@pytest.mark.parametrize("host_reads", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, min_p=0.1, top_k=9, top_p=0.7),
    ],
)
def test_filters_keep_the_tokens_transformers_warpers_keep(params: SamplingParams, host_reads: bool) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(4))
    warped = TemperatureLogitsWarper(params.temperature)(None, logits[None].clone())  # type: ignore[arg-type]
    if params.min_p:
        warped = MinPLogitsWarper(params.min_p)(None, warped)  # type: ignore[arg-type]
    if params.top_k:
        warped = TopKLogitsWarper(params.top_k)(None, warped)  # type: ignore[arg-type]
    if params.top_p < 1:
        warped = TopPLogitsWarper(params.top_p)(None, warped)  # type: ignore[arg-type]
    expected = set(torch.nonzero(torch.isfinite(warped[0])).flatten().tolist())
    assert kept_tokens(logits, params, host_reads) == expected


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_tokens_tied_at_the_edge_of_a_filter_are_all_kept(params: SamplingParams) -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 2.0, -1.0, 2.0])
    assert kept_tokens(logits, params, True) == {1, 2, 3, 5}


@pytest.mark.parametrize("host_reads", [True, False])
def test_top_p_looks_beyond_its_first_candidates_when_the_distribution_is_flat(
    host_reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "_TOP_P_CANDIDATES", 4)
    logits = -0.01 * torch.arange(40.0)
    mass = torch.softmax(logits, 0).cumsum(0)
    expected = set(range(int((mass < 0.75).sum()) + 1))
    assert 4 < len(expected) < 40
    assert kept_tokens(logits, SamplingParams(top_p=0.75), host_reads) == expected
    assert kept_tokens(logits, SamplingParams(top_p=0.75, top_k=6), host_reads) == {0, 1, 2, 3, 4}


# --- distribution and seeds


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    keep = expected > 0
    assert counts[~keep].sum() == 0
    return float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())


@pytest.mark.parametrize("same_seed", [True, False])
def test_draws_follow_the_filtered_distribution(same_seed: bool) -> None:
    """Across output indices of one seed, and across neighbouring seeds at one index."""
    vocab, count = 700, 20_000  # three blocks, the last one partial
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1, vocab).astype(np.float32)
    logits[rng.permutation(vocab)[:640]] -= 30.0  # sixty tokens share nearly all the mass
    p = SamplingParams(temperature=1.3, top_p=0.95, min_p=0.01)
    state = SamplingState(count, vocab, "cpu")
    for row in range(count):
        seeded = SamplingParams(temperature=1.3, top_p=0.95, min_p=0.01, seed=9 if same_seed else row)
        state.admit(row, seeded, (), NONE, NONE)
    rows = np.arange(count, dtype=np.int32)
    index = rows if same_seed else np.zeros(count, np.int32)
    tokens = Sampler(state).sample(torch.from_numpy(logits).expand(count, -1).clone(), rows, index).tokens
    expected = reference_weights(logits.copy(), p) * count
    degrees = int((expected > 0).sum()) - 1
    statistic = chi_square(np.bincount(tokens.numpy(), minlength=vocab), expected)
    assert degrees > 20
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations; the seeds are fixed


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    pair = uniforms(
        np.repeat(np.arange(200, dtype=np.uint64), 200), np.tile(np.arange(200, dtype=np.int32), 200)
    )
    assert pair.min() >= 0
    assert pair.max() < 1
    grid = np.histogram2d(pair[:, 0], pair[:, 1], bins=10, range=[[0, 1], [0, 1]])[0]
    assert chi_square(grid.ravel(), np.full(100, len(pair) / 100)) < 99 + 4 * math.sqrt(198)
    by_seed = pair[:, 0].reshape(200, 200)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.02


def generate(
    companions: int, preempt_at: int | None = None, sequence_index: int = 0, length: int = 12
) -> list[int]:
    """Tokens of one seeded sequence with penalties, among companions and perhaps with a preemption."""
    vocab = 300
    p = SamplingParams(
        seed=1234, temperature=1.1, top_p=0.9, frequency_penalty=0.8, bad_words_token_ids=((4, 5),)
    )
    state = SamplingState(32, vocab, "cpu", random_seed=companions)
    sampler = Sampler(state)
    others = [SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(min_p=0.1, logprobs=2)]
    for row in range(companions):
        state.admit(row, others[row % 3], (), NONE, NONE)
    mine = companions
    prompt = int32(1, 2, 3)
    state.admit(mine, p, (), prompt, NONE, sequence_index)
    tokens: list[int] = []
    for step in range(length):
        if step == preempt_at:
            state.release(mine)
            mine = 31
            state.admit(mine, p, (), prompt, np.array(tokens, np.int32), sequence_index)
        rows = np.array([*range(companions), mine], np.int32)
        logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(step))
        logits[-1] = torch.randn(vocab, generator=torch.Generator().manual_seed(1000 + step)) * 2
        result = sampler.sample(logits, rows, np.full(len(rows), step, np.int32))
        state.observe(rows, result.tokens)
        tokens.append(int(result.tokens[-1]))
    return tokens


def test_a_seeded_sequence_does_not_depend_on_batch_row_or_preemption() -> None:
    alone = generate(0)
    assert generate(7) == alone
    assert generate(3, preempt_at=5) == alone
    assert len(set(alone)) > 3


def test_siblings_draw_different_tokens_from_one_seed() -> None:
    drawn = [generate(0, sequence_index=i) for i in range(3)]
    assert len({tuple(d) for d in drawn}) == 3
    assert generate(2, sequence_index=2) == drawn[2]


def test_unseeded_rows_follow_the_engine_seed_in_admission_order() -> None:
    def seeds(random_seed: int) -> list[int]:
        state = SamplingState(4, 10, "cpu", random_seed)
        for row in range(4):
            state.admit(row, SamplingParams(), (), NONE, NONE)
        return state.seed.tolist()

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 8


# --- edges


def one(params: SamplingParams, logits: torch.Tensor, host_reads: bool = True) -> tuple[int, bool]:
    state = SamplingState(1, logits.shape[0], "cpu")
    state.admit(0, params, (2,), NONE, NONE)
    host = Sampler(state, host_reads).sample(logits[None].clone(), int32(0), int32(0)).to_host()
    return int(host.tokens[0]), bool(host.bad_rows[0])


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1000)
    logits[[17, 400, 999]] = 5.0
    assert one(SamplingParams(temperature=0), logits) == (17, False)
    assert one(SamplingParams(temperature=0, logit_bias={17: -1.0}), logits) == (400, False)


@pytest.mark.parametrize("host_reads", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_counts_as_minus_infinity_and_plus_infinity_wins(temperature: float, host_reads: bool) -> None:
    nan, inf = float("nan"), float("inf")
    p = SamplingParams(temperature=temperature, top_p=0.9, top_k=3, min_p=0.1, logprobs=2)
    assert one(p, torch.tensor([nan, -inf, 60.0, nan, 1.0]), host_reads) == (2, False)
    assert one(p, torch.tensor([0.0, inf, 60.0, nan]), host_reads) == (1, False)
    assert one(p, torch.tensor([nan, nan, nan]), host_reads)[1]
    assert one(p, torch.tensor([-inf, -inf, -inf]), host_reads)[1]


def test_a_bad_row_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 600
    draw = sampler_module._inverse_cdf

    def careless(weights: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
        # A device whose argmax makes something else of NaN than the CPU's.
        return torch.where(weights.isnan().any(1), 10**6, draw(weights, pair))

    monkeypatch.setattr(sampler_module, "_inverse_cdf", careless)
    logits = torch.zeros(4, vocab)
    logits[1] = float("nan")
    logits[:, 300] = torch.tensor([50.0, float("nan"), 50.0, 50.0])
    state = SamplingState(4, vocab, "cpu")
    state.admit(0, SamplingParams(), (), NONE, NONE)
    state.admit(1, SamplingParams(top_p=0.5), (), NONE, NONE)
    state.admit(2, SamplingParams(temperature=0), (), NONE, NONE)
    state.admit(3, SamplingParams(allowed_token_ids=(4,), bad_words_token_ids=((4,),)), (), NONE, NONE)
    host = Sampler(state).sample(logits, int32(0, 1, 2, 3), int32(0, 0, 0, 0)).to_host()
    assert host.bad_rows.tolist() == [False, True, False, True]
    assert host.tokens[[0, 2]].tolist() == [300, 300]
    assert ((host.tokens >= 0) & (host.tokens < vocab)).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=2e-5, top_k=2, top_p=0.5),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
    ],
)
def test_extreme_settings_come_down_to_the_most_likely_token(params: SamplingParams) -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3))
    assert one(params, logits) == (int(logits.argmax()), False)


@pytest.mark.parametrize("host_reads", [True, False])
def test_a_quotient_that_overflows_still_wins(host_reads: bool) -> None:
    logits = torch.full((500,), 1.0)
    logits[100] = 3e38
    params = SamplingParams(temperature=2e-5, top_p=0.9)
    assert one(params, logits, host_reads) == (100, False)
    logits[499] = 2e38  # overflows as well: both count as the largest float
    assert kept_tokens(logits, params, host_reads) == {100, 499}


def test_top_k_beyond_the_vocabulary_is_no_filter() -> None:
    assert kept_tokens(torch.zeros(12), SamplingParams(top_k=10**6), True) == set(range(12))


def test_a_uniform_at_either_end_never_picks_a_token_without_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.full((600,), float("-inf"))
    logits[[5, 290]] = 0.0
    for value, expected in ((0.0, 5), (1 - 2.0**-24, 290), (1.0, 5)):
        # 1.0 cannot occur; it stands for a running sum that rounds below its own total.
        def fixed(seeds: np.ndarray, num_output: np.ndarray, value: float = value) -> np.ndarray:
            return np.full((len(seeds), 2), value, np.float32)

        monkeypatch.setattr(sampler_module, "uniforms", fixed)
        assert one(SamplingParams(), logits) == (expected, False)


def test_an_empty_batch_gives_an_empty_result() -> None:
    result = Sampler(SamplingState(1, 9, "cpu")).sample(torch.zeros(0, 9), NONE, NONE).to_host()
    assert result.tokens.tolist() == []
    assert result.logprobs is None
