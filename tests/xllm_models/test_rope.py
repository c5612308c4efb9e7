"""The rotary table against transformers' rotary embedding, for every scaling."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from xllm_models.config import ModelConfig
from xllm_models.layers.rotary import RotaryTable

POSITIONS = 64
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 24},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
                    "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                    "attention_factor": 0.9},
}


def hf_config(scaling, **changes):
    settings = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": POSITIONS} | changes
    return LlamaConfig(rope_parameters={"rope_theta": 500.0} | scaling, architectures=["LlamaForCausalLM"], **settings)


def our_table(config, positions):
    ours = ModelConfig.from_dict(config.to_dict())
    table = RotaryTable(ours.rope, ours.head_dim, torch.device("cpu"))
    table.reserve(positions)
    return table.cos_sin


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name):
    config = hf_config(SCALINGS[name])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
    expected = torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=-1)
    torch.testing.assert_close(our_table(config, POSITIONS)[:POSITIONS], expected, rtol=0, atol=2e-6)


def test_dynamic_equals_transformers_generating_token_by_token():
    config = hf_config(SCALINGS["dynamic"], max_position_embeddings=16)
    rotary, table = LlamaRotaryEmbedding(config), our_table(config, POSITIONS)
    for position in range(POSITIONS):
        cos, sin = rotary(torch.zeros(1), torch.tensor([[position]]))
        expected = torch.cat([cos[0, 0, :16], sin[0, 0, :16]])
        torch.testing.assert_close(table[position], expected, rtol=0, atol=1e-5)


def test_the_table_grows_without_changing():
    ours = ModelConfig.from_dict(hf_config(SCALINGS["dynamic"], max_position_embeddings=16).to_dict())
    table = RotaryTable(ours.rope, ours.head_dim, torch.device("cpu"))
    table.reserve(10)
    before = table.cos_sin
    table.reserve(before.shape[0])
    assert table.cos_sin is before
    table.reserve(before.shape[0] + 1)
    assert torch.equal(table.cos_sin[: before.shape[0]], before)


def test_partial_rotation_sizes_the_table_by_the_rotated_part():
    assert our_table(hf_config({"rope_type": "default", "partial_rotary_factor": 0.5}), 8).shape[1] == 16
