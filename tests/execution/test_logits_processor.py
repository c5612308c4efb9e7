"""Processors against a plain rendering of their definitions, and against transformers' where it has them."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from xllm_npu.execution.logits_processor import apply_processors
from xllm_npu.execution.sampling_state import SamplingState
from xllm_npu.state.sampling_params import SamplingParams

VOCAB = 50
NONE = np.zeros(0, np.int32)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def processed(
    params: SamplingParams,
    *,
    prompt: np.ndarray = NONE,
    output: np.ndarray = NONE,
    observed: tuple[int, ...] = (),
    eos: tuple[int, ...] = (2,),
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the processors make of one row, `observed` being the tokens sampled since admission."""
    state = SamplingState(4, VOCAB, "cpu")
    state.admit(1, params, eos, prompt, output)
    for token in observed:
        state.observe(int32(1), torch.tensor([token]))
    x = (torch.zeros(1, VOCAB) if logits is None else logits.clone()).contiguous()
    apply_processors(x, state, int32(1), int32(len(output) + len(observed)), state.needs[int32(1)])
    return x[0]


def masked(x: torch.Tensor) -> set[int]:
    return set(torch.nonzero(x == float("-inf")).flatten().tolist())


def test_allowed_ids_mask_all_others() -> None:
    x = processed(SamplingParams(allowed_token_ids=(7, 3, 3)), logits=torch.arange(VOCAB).float()[None])
    assert masked(x) == set(range(VOCAB)) - {3, 7}
    assert x[3] == 3
    assert x[7] == 7


@pytest.mark.parametrize(("generated", "blocked"), [(0, {2, 9, 11}), (2, {2, 9, 11}), (3, set()), (4, set())])
def test_min_tokens_masks_eos_and_stop_ids_until_reached(generated: int, blocked: set[int]) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(9, 11))
    assert masked(processed(params, output=np.full(generated, 5, np.int32))) == blocked


def test_min_tokens_masks_eos_even_if_it_would_be_ignored() -> None:
    assert masked(processed(SamplingParams(min_tokens=1, ignore_eos=True), eos=(2, 4))) == {2, 4}


def test_min_tokens_without_anything_to_mask_and_ids_above_the_vocabulary() -> None:
    assert masked(processed(SamplingParams(min_tokens=1), eos=())) == set()
    assert masked(processed(SamplingParams(min_tokens=1), eos=(VOCAB + 5,))) == set()


def test_logit_bias_is_added_and_does_not_lift_a_mask() -> None:
    x = processed(SamplingParams(logit_bias={4: 2.5, 6: -100.0, 2: 50.0}, min_tokens=1))
    assert x[4] == 2.5
    assert x[6] == -100
    assert x[2] == float("-inf")
    assert x[5] == 0


BAD = SamplingParams(bad_words_token_ids=((8,), (1, 2), (1, 2, 3), (4, 4, 5), (6, 3)))


@pytest.mark.parametrize(
    ("history", "forbidden"),
    [
        ((), {8}),
        ((1,), {8, 2}),
        ((9, 1), {8, 2}),
        ((1, 2), {8, 3}),
        ((4,), {8}),
        ((4, 4), {8, 5}),
        ((2, 1), {8, 2}),
        ((7, 6), {8, 3}),
        ((1, 2, 6), {8, 3}),
    ],
)
@pytest.mark.parametrize("kept_by", ["admit", "observe", "both"])
def test_bad_words_forbid_the_last_token_of_a_begun_word(
    history: tuple[int, ...], forbidden: set[int], kept_by: str
) -> None:
    split = {"admit": len(history), "observe": 0, "both": len(history) // 2}[kept_by]
    # The prompt does not begin a word: only what was generated counts.
    x = processed(BAD, prompt=int32(4, 4), output=int32(*history[:split]), observed=history[split:])
    assert masked(x) == forbidden


def test_a_token_that_ends_two_words_is_masked_if_either_has_begun() -> None:
    params = SamplingParams(bad_words_token_ids=((1, 3), (2, 3)))
    assert masked(processed(params, output=int32(1))) == {3}
    assert masked(processed(params, output=int32(2))) == {3}


def test_penalties_follow_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, VOCAB, generator=generator)
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4)
    prompt, output, observed = int32(1, 2, 2), int32(3, 3), (3, 4, 1)
    expected = logits[0].clone()
    for t in {1, 2, 3, 4}:
        expected[t] = expected[t] / 1.3 if expected[t] > 0 else expected[t] * 1.3
    for t, n in {3: 3, 4: 1, 1: 1}.items():
        expected[t] -= 0.7 * n - 0.4
    x = processed(params, prompt=prompt, output=output, observed=observed, logits=logits)
    torch.testing.assert_close(x, expected)


def test_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[1, 5, 5, 9, 30]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())[0]
    x = processed(
        SamplingParams(repetition_penalty=1.7),
        prompt=int32(1, 5),
        output=int32(5),
        observed=(9, 30),
        logits=logits,
    )
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_a_released_row_leaves_nothing_to_its_successor() -> None:
    everything = SamplingParams(
        allowed_token_ids=(1,),
        bad_words_token_ids=((1,),),
        min_tokens=5,
        logit_bias={1: 1.0},
        repetition_penalty=2.0,
        logprobs=3,
        temperature=0,
    )
    state = SamplingState(1, VOCAB, "cpu")
    state.admit(0, everything, (2,), int32(1, 2), int32(3))
    state.observe(int32(0), torch.tensor([4]))
    state.release(0)
    state.release(0)
    assert not any((state.stop_ids, state.bias, state.allowed, state.bad_words, state.logprob_ids))
    state.admit(0, SamplingParams(frequency_penalty=1.0), (2,), int32(6), NONE)
    x = torch.zeros(1, VOCAB)
    state.observe(int32(0), torch.tensor([5]))
    apply_processors(x, state, int32(0), int32(1), state.needs[int32(0)])
    assert torch.nonzero(x[0]).flatten().tolist() == [5]


def test_token_counts_survive_the_growth_of_their_pool() -> None:
    state = SamplingState(20, VOCAB, "cpu")
    for row in range(20):
        state.admit(row, SamplingParams(frequency_penalty=1.0), (), NONE, int32(row))
    rows = np.arange(20, dtype=np.int32)
    state.observe(rows, torch.arange(20) + 20)
    x = torch.zeros(20, VOCAB)
    apply_processors(x, state, rows, rows, state.needs[rows])
    for row in range(20):
        assert torch.nonzero(x[row]).flatten().tolist() == [row, row + 20]


def test_released_rows_give_their_counts_back_to_the_pool() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    for _ in range(50):
        state.admit(0, SamplingParams(frequency_penalty=1.0), (), NONE, NONE)
        state.release(0)
    state.admit(0, SamplingParams(frequency_penalty=1.0), (), NONE, NONE)
    assert state.counts.output.shape[0] < 10


def test_rows_that_ask_for_nothing_are_not_touched() -> None:
    state = SamplingState(3, VOCAB, "cpu")
    state.admit(0, SamplingParams(), (2,), NONE, NONE)
    state.admit(
        1, SamplingParams(presence_penalty=1.0, logit_bias={3: 1.0}, min_tokens=2), (2,), NONE, int32(7)
    )
    state.admit(2, SamplingParams(temperature=0), (2,), NONE, NONE)
    rows = int32(2, 1, 0)
    x = torch.zeros(3, VOCAB)
    apply_processors(x, state, rows, int32(0, 1, 0), state.needs[rows])
    assert x[0].abs().sum() == 0
    assert x[2].abs().sum() == 0
    assert x[1, 3] == 1
    assert x[1, 7] == -1
    assert x[1, 2] == float("-inf")
