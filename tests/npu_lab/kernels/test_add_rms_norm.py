"""The fused residual sum and RMS norm on the emulated device against its reference."""

from __future__ import annotations

import pytest
import torch
from xllm_kernels_npu.add_rms_norm import add_rms_norm, add_rms_norm_reference

from tests.npu_lab.kernels.numbers import DTYPES, random, same

pytestmark = pytest.mark.npu_lab


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (85, 130), (5, 2048), (2, 5000)])
def test_numbers(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual, weight = (random(shape, dtype, device) for shape in ((rows, width), (rows, width), (width,)))
    before = x.cpu(), residual.cpu()
    normed, total = add_rms_norm(x, residual, weight, 0.02)
    wanted, exact = add_rms_norm_reference(*before, weight.cpu(), 0.02)
    same(normed, wanted)
    assert torch.equal(total.cpu(), exact)
    assert torch.equal(x.cpu(), before[0])
    assert torch.equal(residual.cpu(), before[1])


def test_weights_of_another_type(device: torch.device) -> None:
    x, residual = (random((5, 5000), torch.bfloat16, device) for _ in "xr")
    weight = random((5000,), torch.float32, device)
    same(add_rms_norm(x, residual, weight, 0.02)[0],
         add_rms_norm_reference(x.cpu(), residual.cpu(), weight.cpu(), 0.02)[0])


def test_nothing_to_do(device: torch.device) -> None:
    empty = torch.empty(0, 8, device=device)
    normed, total = add_rms_norm(empty, empty, torch.ones(8, device=device), 1e-6)
    assert normed.shape == total.shape == (0, 8)
