"""The gated activations on the emulated device against their references."""

from __future__ import annotations

import pytest
import torch
from xllm_kernels_npu.swiglu import swiglu, swiglu_reference
from xllm_kernels_npu.swiglu_quant import swiglu_quant, swiglu_quant_reference

from tests.npu_lab.kernels.numbers import DTYPES, random, same

pytestmark = pytest.mark.npu_lab

SIZES = [(1, 1), (3, 7), (85, 130), (5, 4096), (2, 5000)]  # rows, width of the result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_numbers(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x = random((rows, 2 * width), dtype, device)
    same(swiglu(x), swiglu_reference(x.cpu()))


def test_large_gates(device: torch.device) -> None:
    x = torch.tensor([[-200.0, 200.0, -1.0, 3.0]], device=device)
    assert torch.equal(swiglu(x).cpu(), torch.tensor([[0.0, 600.0]]))


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = random((9, 300), torch.float32, device)
    same(swiglu(wide[:, 100:200]), swiglu_reference(wide[:, 100:200].cpu()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_quantised_numbers(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x = random((rows, 2 * width), dtype, device)
    values, scales = swiglu_quant(x)
    wanted, wanted_scales = swiglu_quant_reference(x.cpu())
    torch.testing.assert_close(scales.cpu(), wanted_scales, atol=0, rtol=1e-5)
    away = (values.cpu().int() - wanted.int()).abs()  # exp is not bit-equal, so what is near a tie may go either way
    assert away.max() <= 1
    assert away.count_nonzero() <= 1e-3 * away.numel()
    assert values.abs().amax(-1).cpu().eq(127).all()


def test_ties_are_rounded_to_even_and_zeros_stay(device: torch.device) -> None:
    """A gate of 200 passes its ups through, times 200; 127 makes the scale 200."""
    ups = torch.tensor([[127.0, -0.5, 0.5, 1.5, 2.5, -126.5], [0.0] * 6])
    values, scales = swiglu_quant(torch.cat((torch.full_like(ups, 200.0), ups), dim=1).to(device))
    assert values.tolist() == [[127, 0, 0, 2, 2, -126], [0] * 6]
    assert scales.tolist() == [200.0, 0.0]


def test_nothing_to_do(device: torch.device) -> None:
    assert swiglu(torch.empty(0, 8, device=device)).shape == (0, 4)
    assert swiglu_quant(torch.empty(0, 8, device=device))[0].shape == (0, 4)
