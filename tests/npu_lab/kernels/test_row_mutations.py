"""Kernels over rows, logits and steps with one place changed fail the comparison that the others pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from xllm_kernels_npu import (
    add_rms_norm,
    decode_input,
    penalties,
    rotary,
    sampling,
    swiglu,
    swiglu_quant,
    token_bitmask,
)

from tests.npu_lab.kernels.mutation import mutated
from tests.npu_lab.kernels.numbers import random, same

pytestmark = [pytest.mark.npu_lab, pytest.mark.slow]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_add_rms_norm(module: ModuleType, device: torch.device) -> None:
    x, residual, weight = (random(shape, torch.float32, device) for shape in ((3, 3000), (3, 3000), (3000,)))
    found = module.add_rms_norm(x, residual, weight, 0.1)
    for one, wanted in zip(found, add_rms_norm.add_rms_norm_reference(x.cpu(), residual.cpu(), weight.cpu(), 0.1)):
        same(one, wanted)


def check_rotary(module: ModuleType, device: torch.device) -> None:
    positions, table = torch.tensor([3, 0, 9]), torch.randn(10, 12)
    norms = [random((20,), torch.float32, device) for _ in "qk"]
    for interleaved in (False, True):
        qkv = random((3, 7 * 20), torch.float32, device)
        wanted = rotary.rotary_reference(
            qkv.cpu(), positions, table, 3, 2, *(one.cpu() for one in norms), 0.1, interleaved)
        same(module.rotary(qkv, positions.to(device), table.to(device), 3, 2, *norms, 0.1, interleaved), wanted)


def check_swiglu(module: ModuleType, device: torch.device) -> None:
    x = random((3, 200), torch.float32, device)
    same(module.swiglu(x), swiglu.swiglu_reference(x.cpu()))


def check_swiglu_quant(module: ModuleType, device: torch.device) -> None:
    """Gates of 200 pass their ups through, times 200."""
    ups = torch.tensor([[1.0, -0.6, 126.7, -127.0], [2.5, -2.5, 3.6, 127.0]])
    values, scales = module.swiglu_quant(torch.cat((torch.full_like(ups, 200.0), ups), 1).to(device))
    assert values.tolist() == [[1, -1, 127, -127], [2, -2, 4, 127]]
    assert scales.tolist() == [200.0, 200.0]


def check_decode_input(module: ModuleType, device: torch.device) -> None:
    last, second = torch.tensor([50, 51, 52, 53]), int32(1, 0, 1, 1)
    given = int32(7, -1, 0), int32(2, 3, 0), int32(0, 20, 15), torch.tensor([[4, 5], [6, 7], [8, 9]], dtype=torch.int32)
    on_device = [one.to(device) for one in (*given, last)]
    for turn in (None, second):
        found = module.decode_input(*on_device, 16, 5, None if turn is None else turn.to(device))
        for one, wanted in zip(found, decode_input.decode_input_reference(*given, last, 16, 5, turn)):
            assert torch.equal(one.cpu(), wanted)


def check_token_bitmask(module: ModuleType, device: torch.device) -> None:
    logits, rows = random((4, 3000), torch.float32, device), int32(3, 1)
    bitmask = torch.randint(-(1 << 31), 1 << 31, (2, 94)).int()
    wanted = token_bitmask.token_bitmask_reference(logits.cpu(), bitmask, rows)
    module.token_bitmask(logits, bitmask.to(device), rows.to(device))
    assert torch.equal(logits.cpu(), wanted)


def check_penalties(module: ModuleType, device: torch.device) -> None:
    logits, counts = random((3, 2500), torch.float32, device), torch.randint(0, 3, (4, 2500), dtype=torch.int32)
    arguments = (int32(2, 0), int32(3, 1), counts, torch.rand(4, 2500) < 0.3, torch.tensor([1.5, 0.7]),
                 torch.tensor([0.3, -0.2]), torch.tensor([0.6, -0.4]))
    wanted = penalties.penalties_reference(logits.cpu(), *arguments)
    module.penalties(logits, *(one.to(device) for one in arguments))
    same(logits, wanted)


def check_sampling(module: ModuleType, device: torch.device) -> None:
    """Logits fall from token to token by 0.01, and noise that grows faster chooses the last one that is kept."""
    logits = (-0.01 * torch.arange(3000.0)).repeat(8, 1)
    logits[1, 0] = torch.nan
    logits[5] = 0.0  # greedy: the first
    logits[6] = (2 * logits[6]).round()  # ties of 50
    temperature = torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    top_k, top_p = int32(30, 0, 0, 1000, 0, 0, 70, 0), torch.tensor([1.0, 1.0, 1.0, 0.6, 0.3, 1.0, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    noise = torch.arange(3000.0).repeat(8, 1)
    noise[7] = 0.0  # the likeliest
    given = (logits, temperature, top_k, top_p, min_p, noise)
    tokens, bad, _ = module.sample(*(one.to(device) for one in given))
    wanted, wanted_bad, _ = sampling.sample_reference(*given)
    assert tokens.tolist() == wanted.tolist()
    assert torch.equal(bad.cpu(), wanted_bad)


CHECKS: dict[ModuleType, Callable[[ModuleType, torch.device], None]] = {
    add_rms_norm: check_add_rms_norm, rotary: check_rotary, swiglu: check_swiglu, swiglu_quant: check_swiglu_quant,
    decode_input: check_decode_input, token_bitmask: check_token_bitmask, penalties: check_penalties,
    sampling: check_sampling,
}
MUTATIONS: list[tuple[ModuleType, str, str]] = [
    (add_rms_norm, "/ WIDTH + eps)", "/ WIDTH) + eps"),
    (add_rms_norm, ".to(tl.float32)\n            added = added", ".to(tl.float32) * 0\n            added = added"),
    (add_rms_norm, ".to(tl.float32)\n            rounded", ".to(tl.float32) * 0\n            rounded"),
    (add_rms_norm, "out + place + start, normed", "out + place, normed"),
    (rotary, "first = one * cos - two", "first = one * cos + two"),
    (rotary, "second = two * cos + one", "second = two * cos - one"),
    (rotary, "table + PAIRS + pair", "table + pair"),
    (rotary, "tl.load(positions + token)", "tl.load(positions)"),
    (rotary, "head < QUERY_HEADS", "head <= QUERY_HEADS"),
    (rotary, "head < ROTATED_HEADS", "head <= ROTATED_HEADS"),  # a value turns
    (rotary, "squares / HEAD_DIM + eps", "squares / ROTARY_DIM + eps"),
    (rotary, "squares += tl.sum(other * other, 1)", "squares += 0.0"),
    (rotary, "2 * pair + 1, pair < PAIRS", "2 * pair, pair < PAIRS"),
    (swiglu, "tl.exp(-gate)", "tl.exp(gate)"),
    (swiglu, "source + WIDTH,", "source + 1,"),
    (swiglu_quant, "tl.abs(value)", "value"),
    (swiglu_quant, "peak / 127.0", "peak / 128.0"),
    (swiglu_quant, "value + _TO_INTEGER - _TO_INTEGER", "value"),
    (decode_input, "seq_lens + row, position + 1", "seq_lens + row, position"),
    (decode_input, "if token < 0:", "if token < -1:"),
    (decode_input, "last_token + place", "last_token + row"),
    (decode_input, "position // BLOCK_SIZE", "0"),
    (decode_input, "2 * position + ", "position + "),
    (decode_input, "row * 0 + 1", "row * 0"),
    (token_bitmask, "[None, :]) != 0", "[None, :]) > 0"),  # bit 31 is the sign
    (token_bitmask, "1, 65536)", "1, 32768)"),
    (token_bitmask, "tl.load(rows + row)", "row"),
    (token_bitmask, "token = first * 32", "token = first"),
    (penalties, "value > 0.0, value / penalty", "value < 0.0, value / penalty"),
    (penalties, "count + prompt > 0.0", "count > 0.0"),
    (penalties, "value -= tl.load(frequency + row) * count", "value -= tl.load(frequency + row)"),
    (penalties, "tl.where(count > 0.0,", "tl.where(count + prompt > 0.0,"),
    (sampling, "reached >= goal", "reached > goal"),
    (sampling, "within_low > 1.0", "within_low > 2.0"),
    (sampling, "distance <= limit, drawn", "distance < limit, drawn"),
    (sampling, "if k > 0:", "if k > 30:"),
    (sampling, "goal = p * _mass(", "goal = p + 0.0 * _mass("),
    (sampling, "value > best, start", "value >= best, start"),
    (sampling, "if BY_MASS:\n                reached", "if False:\n                reached"),
    (sampling, "tl.where(value == value, value, float(\"-inf\"))", "value"),
    (sampling, "drawn - distance", "drawn + distance"),
]


@pytest.mark.parametrize("module", CHECKS, ids=lambda module: module.__name__)
def test_unchanged(module: ModuleType, device: torch.device) -> None:
    CHECKS[module](module, device)


@pytest.mark.parametrize(("module", "old", "new"), MUTATIONS, ids=[new.split("\n")[0] for _, _, new in MUTATIONS])
def test_mutation_is_noticed(module: ModuleType, old: str, new: str, device: torch.device, tmp_path: Path) -> None:
    changed = mutated(module, old, new, tmp_path)
    with pytest.raises(AssertionError):
        CHECKS[module](changed, device)
