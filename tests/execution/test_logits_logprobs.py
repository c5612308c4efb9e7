"""Log probabilities are those of the raw logits, with ranks, in OpenAI's column order."""

import numpy as np
import torch

from xllm_npu.execution.logprobs import prompt_logprobs
from xllm_npu.execution.sampler import Sampler
from xllm_npu.execution.sampling_state import SamplingState
from xllm_npu.state.sampling_params import SamplingParams

NONE = np.zeros(0, np.int32)


def test_each_row_gets_the_columns_it_asked_for() -> None:
    vocab = 80
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits, 1)
    state = SamplingState(8, vocab, "cpu")
    # Bias and temperature change what is chosen, not what is reported.
    state.admit(5, SamplingParams(temperature=0, logprobs=3, logit_bias={40: 100.0}), (), NONE, NONE)
    state.admit(2, SamplingParams(temperature=0.5, top_k=1), (), NONE, NONE)
    state.admit(7, SamplingParams(temperature=0, logprobs=0), (), NONE, NONE)
    state.admit(0, SamplingParams(temperature=0, logprob_token_ids=(9, 70)), (), NONE, NONE)
    host = (
        Sampler(state)
        .sample(logits.clone(), np.array([5, 2, 7, 0], np.int32), np.zeros(4, np.int32))
        .to_host()
    )
    assert host.logprobs is not None
    entries = host.logprobs.by_row()
    assert set(entries) == {5, 7, 0}
    top = logits[0].topk(3).indices.tolist()
    assert entries[5].token_ids == [40, *top]
    assert entries[5].ranks[1:] == [1, 2, 3]
    assert entries[5].ranks[0] == int((logits[0] > logits[0, 40]).sum()) + 1
    assert entries[7].token_ids == [int(logits[2].argmax())]
    assert entries[7].ranks == [1]
    assert entries[0].token_ids == [int(logits[3].argmax()), 9, 70]
    for row, entry in ((0, entries[5]), (2, entries[7]), (3, entries[0])):
        np.testing.assert_allclose(entry.logprobs, expected[row][entry.token_ids].numpy(), rtol=1e-5)
        assert entry.ranks == [int((logits[row] > logits[row, t]).sum()) + 1 for t in entry.token_ids]


def test_tied_tokens_share_the_better_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    entry = prompt_logprobs(logits, np.array([2], np.int32), 3).entry(0)
    assert entry.token_ids[0] == 2
    assert sorted(entry.token_ids[1:]) == [0, 1, 2]
    assert entry.ranks == [1, 1, 1, 3]


def test_prompt_logprobs_are_those_of_the_following_token() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    following = np.array([3, 0, 29, 7, 7], np.int32)
    result = prompt_logprobs(logits, following, 2, np.array([11], np.int64))
    expected = torch.log_softmax(logits, 1)
    for i, token in enumerate(following.tolist()):
        entry = result.entry(i)
        assert entry.token_ids == [token, *logits[i].topk(2).indices.tolist(), 11]
        np.testing.assert_allclose(entry.logprobs, expected[i][entry.token_ids].numpy(), rtol=1e-5)


def test_more_top_tokens_than_the_vocabulary_has() -> None:
    entry = prompt_logprobs(torch.zeros(1, 4), np.array([1], np.int32), 20).entry(0)
    assert sorted(entry.token_ids[1:]) == [0, 1, 2, 3]
