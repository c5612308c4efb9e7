"""What tests of kernels share: random tensors on the emulated device, and how near a result has to be."""

from __future__ import annotations

import pytest
import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Where each takes long.
FEW_DTYPES = (pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16, torch.float32)
_NEAR = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}  # absolute and relative


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """`expected` [like result] float32, from the same inputs without rounding in between."""
    near = _NEAR[result.dtype]
    torch.testing.assert_close(result.cpu().float(), expected.cpu().float(), atol=near, rtol=near)
