"""The side path of adapters: all slots at once equal one adapter after the other, and ranks' parts equal the whole."""

from __future__ import annotations

import pytest
import torch
from xllm_models.layers.linear import FusedColumnLinear, RowLinear
from xllm_models.layers.lora import LinearLora, LoraStep, attach_lora, find_targets
from xllm_models.ops import torch_ops
from xllm_models.registry import build_model, read_model_config
from xllm_models.weights.loader import region_of
from xllm_models.weights.source import read_region
from xllm_platform.parallel import Group, ParallelState

from tests.support.tiny_model import make_tiny_model

KIND = {"ops": torch_ops, "dtype": torch.float32, "device": torch.device("cpu")}
SLOTS, RANK = 3, 4


def side_path(parts=((0, 6), (6, 10))):
    torch.manual_seed(0)
    layer = FusedColumnLinear(12, [(f"part{i}", rows, 0, 1) for i, (_, rows) in enumerate(parts)], False, **KIND)
    lora = LinearLora(layer, parts, SLOTS, RANK, LoraStep(), torch.float32, torch.device("cpu"))
    for slot, rank in enumerate((4, 2, 1)):
        for part, (_, rows) in enumerate(parts):
            if (slot, part) != (1, 0):  # an adapter that changes one part only
                lora.put(slot, part, (torch.randn(rank, 12), torch.randn(rows, rank)))
    return lora


def begin(lora: LinearLora, token_slots: torch.Tensor) -> None:
    columns = torch.arange(SLOTS).repeat_interleave(RANK)
    lora.step.own = token_slots[:, None, None] == columns


def test_all_slots_at_once_equal_one_after_the_other():
    lora = side_path()
    x, y = torch.randn(9, 12), torch.randn(9, 16)
    token_slots = torch.tensor([0, 1, 2, -1, 2, 0, -1, 1, 1])
    begin(lora, token_slots)
    plain = lora.add_plainly(y, x, token_slots)
    found = lora.add(y.clone(), x)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[token_slots == -1], y[token_slots == -1])  # to the bit
    assert not torch.allclose(found[token_slots == 0], y[token_slots == 0])


def test_a_row_that_overflows_spoils_no_other():
    lora = side_path()
    x, y = torch.randn(2, 12), torch.randn(2, 16)
    x[0] = torch.inf
    begin(lora, torch.tensor([0, 1]))
    assert lora.add(y, x)[1].isfinite().all()


def test_what_a_slot_held_before_is_gone():
    lora = side_path()
    fresh = side_path()
    for part in (0, 1):
        lora.put(0, part, None)
    begin(lora, torch.tensor([0]))
    y = torch.randn(1, 16)
    assert torch.equal(lora.add(y.clone(), torch.randn(1, 12)), y)
    assert not torch.equal(lora.a, fresh.a)


@pytest.mark.parametrize(("name", "count"), [("llama", 14), ("phi3", 8), ("glm4", 12), ("deepseek_v3", 11)])
def test_what_a_rank_has_of_an_adapter_is_what_it_would_have_of_the_sum(name, count, tmp_path):
    """The side path equals B A, cut as the loader cuts a weight: rows, columns, places, and their order."""
    config = read_model_config(make_tiny_model(tmp_path / "m", name))
    for model in (build_model(config, dtype=torch.float32, parallel=parallel) for parallel in two_ranks()):
        assert len(find_targets(model)) == count
        slots = attach_lora(model, 1, RANK)
        torch.manual_seed(1)
        for module, target in slots.targets.items():
            rows, columns = target.shape
            a, b = torch.randn(RANK, columns), torch.randn(rows, RANK)
            slots.put(0, {module: target.cut(module, a, b)})
            layer, x = target.layer, torch.randn(1, target.layer.in_features)
            layer.lora.step.own = torch.ones(1, 1, RANK, dtype=torch.bool)
            found = layer.lora.add(torch.zeros(1, layer.out_features), x)
            expected = x @ cut_like_a_weight(model, module, b @ a).t()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=module)


def cut_like_a_weight(model, module: str, whole: torch.Tensor) -> torch.Tensor:
    """In a layer of zeros."""
    placement = model.placements()[f"{module}.weight"]
    part = read_region(lambda region: whole[region], region_of(module, placement))
    weight = placement.param.data.zero_()
    if placement.store is not None:
        placement.store(part)
    else:
        weight[placement.dest].copy_(part)
    return weight.clone()


def two_ranks():
    for rank in (0, 1):
        both, one = Group((0, 1), rank), Group()
        yield ParallelState(world=both, tp=both, dp=one, ep=one, moe_tp=both)


def test_a_row_parallel_layer_adds_before_its_sum():
    layer = RowLinear(8, 5, False, Group(), **KIND)
    torch.nn.init.normal_(layer.weight)
    step = LoraStep()
    layer.lora = LinearLora(layer, [(0, 5)], 1, 2, step, torch.float32, torch.device("cpu"))
    a, b, x = torch.randn(2, 8), torch.randn(5, 2), torch.randn(3, 8)
    layer.lora.put(0, 0, (a, b))
    without = layer(x)
    step.own = torch.ones(3, 1, 2, dtype=torch.bool)
    torch.testing.assert_close(layer(x), x @ (layer.weight + b @ a).t(), rtol=1e-4, atol=1e-4)
    step.own = None
    assert torch.equal(layer(x), without)
