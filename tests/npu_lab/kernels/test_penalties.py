"""The penalties' kernel on the emulated device against its reference and against the host's logits processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from xllm_kernels_npu.penalties import penalties, penalties_reference

from tests.npu_lab.kernels.numbers import random
from xllm_npu.execution.logits_processor import apply_processors
from xllm_npu.execution.sampling_state import SamplingState
from xllm_npu.state.sampling_params import SamplingParams

pytestmark = pytest.mark.npu_lab

PENALTIES = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.4), (0.8, -0.3, 1.1)]  # repetition, frequency, presence


def history(slots: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.randint(0, 4, (slots, vocab)) * torch.randint(0, 2, (slots, vocab))
    return counts.to(torch.int32), torch.rand(slots, vocab) < 0.3


@pytest.mark.parametrize("vocab", [1, 7, 2048, 5001])
def test_numbers(device: torch.device, vocab: int) -> None:
    logits, (output, in_prompt) = random((6, vocab), torch.float32, device), history(9, vocab)
    rows, slots = (torch.tensor(values, dtype=torch.int32) for values in ([5, 0, 3, 2], [8, 1, 0, 4]))
    arguments = (rows, slots, output, in_prompt, *torch.tensor(PENALTIES).unbind(1))
    wanted = penalties_reference(logits.cpu(), *arguments)
    penalties(logits, *(one.to(device) for one in arguments))
    torch.testing.assert_close(logits.cpu(), wanted, atol=1e-6, rtol=1e-6)


def test_rows_of_the_logits_processor(device: torch.device) -> None:
    """Every row as the host's processor leaves it, from the counts that it keeps."""
    vocab = 50
    state = SamplingState(8, vocab, "cpu")
    rows = np.array([6, 1, 4, 0], np.int32)
    for row, (repetition, frequency, presence) in zip(rows.tolist(), PENALTIES, strict=True):
        params = SamplingParams(
            repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
        prompt, output = (np.random.randint(0, vocab, 20).astype(np.int32) for _ in "po")
        state.admit(row, params, [], prompt, output)
    logits = random((4, vocab), torch.float32, device)
    on_host = logits.cpu()
    apply_processors(on_host, state, rows, np.full(4, 20, np.int32), state.needs[rows])
    penalties(
        logits, torch.arange(4, dtype=torch.int32, device=device), state.counts.slots(rows).int().to(device),
        state.counts.output.to(device), state.counts.in_prompt.to(device),
        *(torch.tensor(PENALTIES)[:, place].to(device) for place in range(3)))
    torch.testing.assert_close(logits.cpu(), on_host, atol=1e-6, rtol=1e-6)


def test_no_rows(device: torch.device) -> None:
    logits, (output, in_prompt) = random((2, 40), torch.float32, device), history(1, 40)
    before = logits.cpu()
    none, nothing = torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(0, device=device)
    penalties(logits, none, none, output.to(device), in_prompt.to(device), nothing, nothing, nothing)
    assert torch.equal(logits.cpu(), before)
