"""Directories of adapters: what is wrong with one is said, by names of files and modules and without a path."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from xllm_models.weights.lora_adapter import CONFIG_NAME, WEIGHTS_NAME, LoraError, read_lora

from tests.support.lora import make_adapter
from tests.support.tiny_model import make_tiny_model

Q = "model.layers.0.self_attn.q_proj"
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def adapter(model, tmp_path):
    return make_adapter(tmp_path / "secret" / "adapter", model, ("q_proj", "v_proj"))


@pytest.fixture
def read(model, adapter):
    shapes = {name.removesuffix(".weight"): tuple(weight.shape)
              for name, weight in load_file(model / "model.safetensors").items() if "_proj" in name}
    modules = frozenset({*shapes, "model.embed_tokens", "model.norm", "lm_head"})
    return lambda: read_lora(adapter, shapes, modules, max_rank=8)


def edit_config(adapter, **fields) -> None:
    file = adapter / CONFIG_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(adapter, change) -> None:
    tensors = load_file(adapter / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS_NAME)


def test_a_good_one(read, adapter):
    files = read()
    assert (files.config.rank, files.config.scale) == (4, 2.0)
    assert len(files.matrices) == 4
    assert torch.equal(files.matrices[Q][0], load_file(adapter / WEIGHTS_NAME)[A])
    edit_config(adapter, use_rslora=True, lora_alpha=3, target_modules=".*_proj", init_lora_weights="gaussian",
                eva_config=None, lora_dropout=0.1, megatron_core="megatron.core")
    assert read().config.scale == 3 / math.sqrt(4)


BAD_CONFIGS = {
    "DoRA": {"use_dora": True}, "modules_to_save": {"modules_to_save": ["lm_head"]}, "bias is all": {"bias": "all"},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}}, "peft_type is 'IA3'": {"peft_type": "IA3"},
    "ranks up to 8 \\(--max_lora_rank\\)": {"r": 16}, "r must be": {"r": "4"}, "at least 1, got 0": {"r": 0},
    "lora_alpha must be": {"lora_alpha": "much"}, "target_modules must be": {"target_modules": [1]},
    "target_modules has k_proj": {"target_modules": ["q_proj", "k_proj"]}, "fan_in_fan_out": {"fan_in_fan_out": True},
    "arrow_config is not supported": {"arrow_config": {"top_k": 2}}, "use_bdlora": {"use_bdlora": {"x": 1}},
    "changes the model's own weights": {"init_lora_weights": "pissa_niter_4"},
    "r is 2|needs \\[2, 64\\]": {"r": 2},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configurations_that_mean_something_else(read, adapter, message):
    edit_config(adapter, **BAD_CONFIGS[message])
    check_refusal(read, adapter, message.replace("'IA3'", "IA3"))


BAD_TENSORS = {
    "adapters cannot change model.embed_tokens": lambda t: t.update(
        {"base_model.model.model.embed_tokens.lora_A.weight": t[A].clone()}),
    "is an embedding": lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[A].clone()}),
    "adapters cannot change model.layers.0.mlp.experts.3.up_proj": lambda t: t.update(
        {"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight": t[A].clone()}),
    "the model has no module model.layers.7.self_attn.q_proj": lambda t: t.update(
        {A.replace(".0.", ".7."): t[A].clone()}),
    "is no LoRA matrix": lambda t: t.update({"base_model.model.lm_head.weight": t[A].clone()}),
    "DoRA magnitude": lambda t: t.update({A.replace("lora_A.weight", "lora_magnitude_vector"): t[A].clone()}),
    "has lora_A and no lora_B": lambda t: t.pop(B),
    "has lora_B and no lora_A": lambda t: t.pop(A),
    r"is \[4, 63\], and the model needs \[4, 64\]": lambda t: t.update({A: t[A][:, 1:].clone()}),
    "holds no tensors": lambda t: t.clear(),
    "has dtype I32": lambda t: t.update({A: t[A].int()}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_tensors_that_are_not_the_models(read, adapter, message):
    edit_tensors(adapter, BAD_TENSORS[message])
    check_refusal(read, adapter, message)


BAD_FILES = {
    "no such directory": lambda d: d.rename(d.with_name("moved")),
    f"has no {CONFIG_NAME}": lambda d: (d / CONFIG_NAME).unlink(),
    "is not JSON": lambda d: (d / CONFIG_NAME).write_text("{"),
    "must hold a JSON object": lambda d: (d / CONFIG_NAME).write_text("[]"),
    "is larger than": lambda d: (d / CONFIG_NAME).write_text(" " * (2**20 + 1)),
    f"has no {WEIGHTS_NAME}": lambda d: (d / WEIGHTS_NAME).unlink(),
    "Pickle files are refused": lambda d: (d / WEIGHTS_NAME).rename(d / "adapter_model.bin"),
    "damaged or truncated": lambda d: (d / WEIGHTS_NAME).write_bytes((d / WEIGHTS_NAME).read_bytes()[:-8]),
    "cannot be read|not JSON": lambda d: (d / CONFIG_NAME).write_bytes(b"\xff\xfe{"),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_FILES)
def test_files_that_are_missing_or_damaged(read, adapter, message):
    BAD_FILES[message](adapter)
    check_refusal(read, adapter, message)


def check_refusal(read, adapter, message: str) -> None:
    with pytest.raises(LoraError, match=message) as caught:
        read()
    assert "secret" not in str(caught.value)
