"""The rotary kernel on the emulated device against its reference, and that against the operators' definition."""

from __future__ import annotations

import pytest
import torch
from xllm_kernels_npu.rotary import rotary, rotary_reference
from xllm_models.ops import torch_ops

from tests.npu_lab.kernels.numbers import FEW_DTYPES, random, same

pytestmark = pytest.mark.npu_lab

# heads, key/value heads, head size, rotated values of each: an odd number of heads; odd everything, partial; more heads
# than a tile holds
SHAPES = [(9, 3, 64, 64), (5, 1, 36, 20), pytest.param((40, 8, 128, 128), marks=pytest.mark.slow)]


def angles(positions: int, rotary_dim: int) -> torch.Tensor:
    turn = torch.arange(positions).unsqueeze(1) * 10000.0 ** (-torch.arange(rotary_dim // 2) / (rotary_dim / 2))
    return torch.cat((turn.cos(), turn.sin()), dim=1)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(
    device: torch.device, dtype: torch.dtype, interleaved: bool, normed: bool, shape: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, head_dim, rotary_dim = shape
    qkv, cos_sin = random((7, (heads + 2 * kv_heads) * head_dim), dtype, device), angles(50, rotary_dim).to(device)
    positions = torch.tensor([0, 1, 49, 7, 7, 30, 2], device=device)
    norms = [random((head_dim,), dtype, device) for _ in "qk"] if normed else [None, None]
    on_host = [None if one is None else one.cpu() for one in norms]
    wanted = rotary_reference(
        qkv.cpu(), positions.cpu(), cos_sin.cpu(), heads, kv_heads, *on_host, 0.02, interleaved)
    same(rotary(qkv, positions, cos_sin, heads, kv_heads, *norms, 0.02, interleaved), wanted)


@pytest.mark.parametrize("shape", [(3, 1, 128, 64), (1, 1, 2, 2), (2, 2, 256, 2)])
def test_other_shapes(device: torch.device, shape: tuple[int, int, int, int]) -> None:
    test_numbers(device, torch.float32, False, True, shape)


@pytest.mark.parametrize("normed", [False, True])
def test_reference_is_the_operator(normed: bool) -> None:
    qkv, positions = torch.randn(5, 8 * 36), torch.tensor([3, 0, 9, 1, 1])
    norms = [torch.randn(36) for _ in "qk"] if normed else [None, None]
    arguments = (positions, angles(10, 20), 4, 2, *norms, 1e-3)
    torch.testing.assert_close(rotary_reference(qkv, *arguments), torch_ops.rotary(qkv, *arguments))


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    """Only what lies inside is changed."""
    wide, cos_sin = random((4, 100), torch.float32, device), angles(9, 8).to(device)
    before, positions = wide.cpu().clone(), torch.tensor([8, 0, 3, 5], device=device)
    rotary(wide[:, 20:84], positions, cos_sin, 4, 2)
    same(wide[:, 20:84], rotary_reference(before[:, 20:84], positions.cpu(), cos_sin.cpu(), 4, 2))
    assert torch.equal(wide[:, :20].cpu(), before[:, :20])
    assert torch.equal(wide[:, 84:].cpu(), before[:, 84:])


def test_nothing_to_do(device: torch.device) -> None:
    empty = torch.empty(0, 32, device=device)
    positions = torch.empty(0, dtype=torch.int64, device=device)
    assert rotary(empty, positions, angles(2, 8).to(device), 2, 1).shape == (0, 32)
