"""RMS norm's kernel on the emulated device against its reference in float32."""

from __future__ import annotations

import pytest
import torch
from xllm_kernels_npu.rms_norm import rms_norm, rms_norm_reference

from tests.npu_lab.kernels.numbers import DTYPES, random, same

pytestmark = pytest.mark.npu_lab


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (1, 128), (85, 130), (41, 4096), (2, 5000)])
def test_numbers(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = random((rows, width), dtype, device), random((width,), dtype, device)
    same(rms_norm(x, weight, 1e-5), rms_norm_reference(x.cpu().float(), weight.cpu().float(), 1e-5))


def test_weights_of_another_type(device: torch.device) -> None:
    x, weight = random((5, 5000), torch.bfloat16, device), random((5000,), torch.float32, device)
    same(rms_norm(x, weight, 0.02), rms_norm_reference(x.cpu().float(), weight.cpu(), 0.02))


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide, weight = random((9, 300), torch.float32, device), random((100,), torch.float32, device)
    same(rms_norm(wide[:, 100:200], weight, 1e-6), rms_norm_reference(wide.cpu()[:, 100:200], weight.cpu(), 1e-6))


def test_nothing_to_do(device: torch.device) -> None:
    assert rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-6).shape == (0, 8)


def test_a_launch_in_a_capture_runs_at_replay(device: torch.device) -> None:
    x, weight = random((5, 64), torch.float32, device), random((64,), torch.float32, device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = rms_norm(x, weight, 1e-6)
    for _ in range(2):
        x.copy_(random((5, 64), torch.float32, device))
        graph.replay()
        same(out, rms_norm_reference(x.cpu(), weight.cpu(), 1e-6))
