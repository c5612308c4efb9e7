"""Every family's weights come through the hook, and a model over memory of somebody's computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from xllm_models.layers.linear import ParallelLinear
from xllm_models.registry import build_model, read_model_config
from xllm_models.weight_memory import WeightLayout, allocating_in
from xllm_models.weights.loader import load_weights
from xllm_models.weights.source import open_source

from tests.support.paged_model import PagedModel
from tests.support.tiny_model import ARCHITECTURES, make_tiny_model
from tests.xllm_models.test_gguf import write_gguf


class Block:
    """One tensor that all weights are cut from."""

    def __init__(self, layout: WeightLayout) -> None:
        self.memory = torch.full((layout.size,), 255, dtype=torch.uint8)
        self.extents = iter(layout.extents)

    def empty(self, shape, dtype, device):
        offset, length = next(self.extents)
        if not length:
            return torch.empty(shape, dtype=dtype)
        return self.memory[offset : offset + length].view(dtype).view(shape)

    def contains(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or 0 <= tensor.data_ptr() - self.memory.data_ptr() < self.memory.numel()


def loaded(directory: Path, memory: Block | None = None, dtype: torch.dtype = torch.float32, kernels: str = "cpu"):
    config = read_model_config(directory, "native")
    if memory is None:
        model = build_model(config, dtype=dtype, kernels=kernels)
    else:
        with allocating_in(memory):
            model = build_model(config, dtype=dtype, kernels=kernels)
    load_weights(model, open_source(directory))
    return model


def planned(directory: Path, dtype: torch.dtype = torch.float32) -> WeightLayout:
    layout = WeightLayout()
    with allocating_in(layout):
        build_model(read_model_config(directory, "native"), dtype=dtype, kernels="cpu")
    return layout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_rule_3_all_weights_lie_in_the_memory_given_plain_and_can_be_loaded_again(tmp_path, architecture, dtype):
    tied = architecture in ("llama", "gemma3")
    directory = make_tiny_model(tmp_path / "m", architecture, tie_word_embeddings=tied)
    layout = planned(directory, dtype)
    assert layout.extents == planned(directory, dtype).extents
    memory = Block(layout)
    model = loaded(directory, memory, dtype)
    assert next(memory.extents, None) is None, "more was planned than allocated"
    state = model.state_dict(keep_vars=True)
    assert [name for name, tensor in state.items() if not memory.contains(tensor)] == []
    assert not [m for m in model.modules() if isinstance(m, ParallelLinear) and m.packed is not None]
    plain = loaded(directory, None, dtype, "torch").state_dict()
    assert state.keys() == plain.keys()
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    for _ in range(2):
        assert [name for name in plain if not torch.equal(state[name], plain[name])] == []
        memory.memory.fill_(255)
        model.allocate_weights()
        load_weights(model, open_source(directory))
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()} == addresses


def test_weights_that_no_operator_packs_stay_where_graphs_know_them(tmp_path, monkeypatch):
    monkeypatch.setattr("xllm_models.ops.torch_ops.pack_linear", lambda weight: None)
    directory = make_tiny_model(tmp_path / "m", "llama")
    model = loaded(directory, None, torch.float32, "torch")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    model.allocate_weights()
    load_weights(model, open_source(make_tiny_model(tmp_path / "other", "llama", seed=1)))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_quantized_gguf_files_are_loaded_again(tmp_path):
    write_gguf(tmp_path / "m.gguf", quantized=True, tied=True)
    memory = Block(planned(tmp_path / "m.gguf"))
    model = loaded(tmp_path / "m.gguf", memory)
    before = memory.memory.clone()
    memory.memory.fill_(255)
    load_weights(model, open_source(tmp_path / "m.gguf"))
    assert torch.equal(memory.memory, before)


def test_logits_are_those_of_packed_weights(tmp_path):
    directory = make_tiny_model(tmp_path / "m", "llama")
    packed = PagedModel(directory)
    with allocating_in(Block(planned(directory))):
        plain = PagedModel(directory)
    assert packed.model.layers[0].mlp.down.packed is not None
    ids = list(range(40, 60))
    torch.testing.assert_close(plain.logits([(0, ids)])[0], packed.logits([(0, ids)])[0], atol=1e-4, rtol=1e-4)
