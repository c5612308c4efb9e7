"""Weights that no file holds: the same on every start and however ranks cut them, and harmless."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from xllm_models.placement import Placement
from xllm_models.weights.dummy_source import DummySource
from xllm_models.weights.loader import load_weights

from tests.support.engine import run_engine
from tests.support.hf_model import make_hf_model
from tests.support.tiny_model import make_tiny_model

SHAPES = {"a": (6, 8), "b": (5,), "experts": (4, 6, 10), "one": ()}


def source(seed=0):
    return DummySource({n: Placement(nn.Parameter(torch.empty(s)), s) for n, s in SHAPES.items()}, seed)


def whole(of):
    return {name: tensor.clone() for name, tensor in of.stream({
        n: tuple(slice(0, size) for size in shape) for n, shape in SHAPES.items()})}


def test_values_depend_on_seed_and_name_alone():
    first, again, other = whole(source()), whole(source()), whole(source(1))
    assert all(torch.equal(first[n], again[n]) and first[n].shape == SHAPES[n] for n in SHAPES)
    assert not any(torch.equal(first[n], other[n]) for n in SHAPES)
    assert len(first["experts"].unique()) > 230
    assert first["a"].abs().max() <= 0.02


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_parts_of_the_whole(dim):
    expected, region = whole(source())["experts"], [slice(0, size) for size in SHAPES["experts"]]
    parts = []
    for rank in range(2):
        half = SHAPES["experts"][dim] // 2
        region[dim] = slice(rank * half, (rank + 1) * half)
        parts += [t for _, t in source().stream({"experts": tuple(region)})]
    assert torch.equal(torch.cat(parts, dim), expected)


def test_sections_of_a_fused_tensor():
    target = nn.Parameter(torch.empty(3, 8))

    class Model:
        def placements(self):
            return {"a": Placement(target, (6, 8), shard_dim=0, sections=((4, 1, 2), (2, 0, 2)))}

    load_weights(Model(), source())
    assert torch.equal(target, whole(source())["a"][[2, 3, 4]])


@pytest.mark.parametrize("make", [lambda d: make_tiny_model(d, "llama"), lambda d: make_hf_model(d, "gpt2")],
                         ids=["native", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_configuration_is_enough_to_serve(tmp_path, make, dtype):
    directory = make(tmp_path / "m")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    prompts = [np.random.default_rng(0).integers(0, 256, 20).tolist()]
    answers = [run_engine(directory, prompts, 6, load_format="dummy", dtype=dtype, random_seed=seed)[0]
               for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    assert len(answers[0][0]) == 6
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == 260
