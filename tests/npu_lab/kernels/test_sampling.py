"""Sampling on the emulated device: what is kept, what is drawn, against a sort, and against the host's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from xllm_kernels_npu.sampling import sample, sample_reference

from xllm_npu.execution.sampler import Sampler
from xllm_npu.execution.sampling_state import RANDOM, SamplingState
from xllm_npu.state.sampling_params import SamplingParams

pytestmark = pytest.mark.npu_lab

# temperature, top_k, top_p, min_p: none, each alone, all together, greedy
FILTERS = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.5, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (0.9, 20, 0.9, 0.02),
           (0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 0, 1.0, 1.0), (2.0, 100000, 0.999, 0.0)]

ROUNDING = 2e-6  # of the mass, where float32 sums it


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def columns(filters: list[tuple[float, int, float, float]]) -> list[torch.Tensor]:
    """temperature, top_k, top_p, min_p"""
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [torch.tensor(values, dtype=kind) for values, kind in zip(zip(*filters, strict=True), kinds, strict=True)]


def gumbel(shape: tuple[int, ...]) -> torch.Tensor:
    return -torch.empty(shape).exponential_().log()


def kept_within(logits: torch.Tensor, temperature: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """[S, V] bool, as `sample` defines its limits; meaningless for greedy rows."""
    x = logits / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    return x.amax(1, keepdim=True) - x <= limits.unsqueeze(1)


def check(device: torch.device, logits: torch.Tensor, filters: list[tuple[float, int, float, float]]) -> None:
    """Exact, but for tokens before which the mass is top_p to float32's rounding of a sum."""
    values, noise = columns(filters), gumbel(tuple(logits.shape))
    tokens, bad, limits = sample(logits.to(device), *(one.to(device) for one in values), noise.to(device))
    temperature, top_k, top_p, min_p = values
    least, most = (sample_reference(logits, temperature, top_k, torch.where(top_p < 1, bound, 1.0), min_p, noise)
                   for bound in ((top_p - ROUNDING).clamp(min=1e-7), top_p + ROUNDING))
    drawn = temperature > 0
    kept = kept_within(logits, temperature, limits.cpu())
    assert not (least[2] & ~kept)[drawn].any()
    assert not (kept & ~most[2])[drawn].any()
    assert torch.equal(bad.cpu(), least[1])
    scores = logits / torch.where(drawn, temperature, 1.0).unsqueeze(1)
    scores = noise - (scores.amax(1, keepdim=True) - scores)
    wanted = torch.where(drawn, scores.masked_fill(~kept, -torch.inf).argmax(1), logits.argmax(1))
    assert torch.equal(tokens.cpu(), wanted)


@pytest.mark.parametrize("vocab", [1, 7, 2048, 5001, 32000])
def test_kept_and_drawn(device: torch.device, vocab: int) -> None:
    check(device, 4 * torch.randn(len(FILTERS), vocab), FILTERS)


def test_ties_at_a_bound_are_all_kept(device: torch.device) -> None:
    """Few different values, so that every bound falls on many tokens."""
    check(device, torch.randint(-3, 3, (len(FILTERS), 3000)).float(), FILTERS)


def test_top_k_of_distinct_logits_keeps_exactly_k(device: torch.device) -> None:
    logits = torch.randperm(6000).float().mul(1e-3).expand(4, -1).contiguous()
    counts = [1, 2, 777, 5999]
    values = columns([(1.0, k, 1.0, 0.0) for k in counts])
    limits = sample(logits.to(device), *(one.to(device) for one in values), gumbel((4, 6000)).to(device))[2]
    assert kept_within(logits, values[0], limits.cpu()).sum(1).tolist() == counts


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.99, 4)])
def test_top_p_keeps_the_token_that_reaches_it(device: torch.device, top_p: float, kept: int) -> None:
    """Masses of 1/2, 1/4, 1/8, 1/8 of four tokens, less what float32 rounds: bounds are not on them but beside."""
    logits = torch.tensor([[0.501, 0.25, 0.125, 0.124]]).log()
    values = columns([(1.0, 0, top_p, 0.0)])
    limits = sample(logits.to(device), *(one.to(device) for one in values), torch.zeros(1, 4, device=device))[2]
    assert kept_within(logits, values[0], limits.cpu()).sum() == kept


def test_logits_that_are_no_numbers(device: torch.device) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[nan, 1.0, nan, 2.0], [inf, 0.0, 1.0, inf], [-inf, -inf, nan, -inf], [-inf, 3.0, -inf, 3.0]])
    values = [one.to(device) for one in columns([(0.0, 0, 1.0, 0.0), (0.5, 0, 0.5, 0.0), (1.0, 3, 0.5, 0.1),
                                                 (1.0, 4, 1.0, 0.0)])]
    noise = torch.tensor([[0.0] * 4, [0.0, 9.0, 9.0, 1.0], [0.0] * 4, [9.0, 0.0, 9.0, 1.0]])
    tokens, bad, _ = sample(logits.to(device), *values, noise.to(device))
    assert bad.tolist() == [False, False, True, False]
    assert [tokens.tolist()[row] for row in (0, 1, 3)] == [3, 3, 3]
    assert 0 <= tokens.tolist()[2] < 4


def test_greedy_ties_go_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4999, 2047, 2048 + 7]] = 1.0
    values = [one.to(device) for one in columns([(0.0, 0, 1.0, 0.0)])]
    assert sample(logits.to(device), *values, torch.zeros(1, 5000, device=device))[0].tolist() == [2047]


def test_what_the_sampler_keeps(device: torch.device) -> None:
    """The floors of the host's sampler for the same rows."""
    vocab, filters = 3000, [one for one in FILTERS if one[0] > 0]
    state = SamplingState(len(filters), vocab, "cpu")
    for row, (temperature, top_k, top_p, min_p) in enumerate(filters):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        state.admit(row, params, [], np.zeros(0, np.int32), np.zeros(0, np.int32))
    rows = np.arange(len(filters), dtype=np.int32)
    assert (state.needs & RANDOM).all()
    logits, values = 3 * torch.randn(len(filters), vocab), columns(filters)
    x = logits / values[0].unsqueeze(1)
    x -= x.amax(1, keepdim=True)
    floor = Sampler(state)._floor(x, rows, state.needs[rows])
    limits = sample(
        logits.to(device), *(one.to(device) for one in values), torch.zeros_like(logits).to(device))[2]
    assert torch.equal(kept_within(logits, values[0], limits.cpu()), x >= floor)


def test_noise_draws_by_probability(device: torch.device) -> None:
    weights = torch.tensor([0.6, 0.3, 0.1])
    draws = 2000
    values = [one.to(device) for one in columns([(1.0, 0, 1.0, 0.0)] * draws)]
    tokens = sample(weights.log().expand(draws, -1).contiguous().to(device), *values, gumbel((draws, 3)).to(device))[0]
    shares = torch.bincount(tokens.cpu(), minlength=3) / draws
    torch.testing.assert_close(shares, weights, atol=0.04, rtol=0)
