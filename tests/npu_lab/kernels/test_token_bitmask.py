"""The grammar's mask on the emulated device against its reference."""

from __future__ import annotations

import pytest
import torch
from xllm_kernels_npu.token_bitmask import token_bitmask, token_bitmask_reference

from tests.npu_lab.kernels.numbers import DTYPES, random

pytestmark = pytest.mark.npu_lab


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "spare_words"), [(1, 0), (31, 1), (32, 0), (33, 0), (5000, 3), (2048, 0)])
def test_forbidden_tokens(device: torch.device, dtype: torch.dtype, vocab: int, spare_words: int) -> None:
    logits = random((5, vocab), dtype, device)
    words = -(-vocab // 32) + spare_words
    bitmask = torch.randint(-(1 << 31), 1 << 31, (3, words)).to(torch.int32)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    wanted = token_bitmask_reference(logits.cpu(), bitmask, rows)
    token_bitmask(logits, bitmask.to(device), rows.to(device))
    assert torch.equal(logits.cpu(), wanted)


@pytest.mark.parametrize("token", [0, 1, 30, 31, 32, 63, 2047, 2048, 2999])
def test_each_bit_stands_for_one_token(device: torch.device, token: int) -> None:
    bitmask = torch.zeros(1, 94, dtype=torch.int32)
    bitmask[0, token // 32] = 1 << token % 32 if token % 32 < 31 else -(1 << 31)
    logits = torch.zeros(1, 3000, device=device)
    token_bitmask(logits, bitmask.to(device), torch.zeros(1, dtype=torch.int32, device=device))
    assert logits.cpu()[0].isfinite().nonzero().flatten().tolist() == [token]


def test_no_rows(device: torch.device) -> None:
    logits = random((2, 40), torch.float32, device)
    before = logits.cpu()
    token_bitmask(logits, torch.zeros(0, 2, dtype=torch.int32, device=device),
                  torch.zeros(0, dtype=torch.int32, device=device))
    assert torch.equal(logits.cpu(), before)
