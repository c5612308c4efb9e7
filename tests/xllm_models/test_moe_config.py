"""What config.json says about experts."""

from __future__ import annotations

import pytest
from xllm_models.config import ModelConfig, ModelConfigError

BASE = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 64}


def moe_of(model_type: str, **changes):
    return ModelConfig.from_dict({"architectures": ["XForCausalLM"], "model_type": model_type, **BASE, **changes}).moe


def test_dense_models_have_none():
    assert moe_of("llama") is None
    assert moe_of("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]) is None


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_the_count(key):
    assert moe_of("qwen3_moe", **{key: 10}).num_experts == 10
    assert moe_of("mixtral", **{key: 10}).num_experts == 10


def test_defaults_are_transformers():
    from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

    families = {"mixtral": MixtralConfig(), "qwen2_moe": Qwen2MoeConfig(), "qwen3_moe": Qwen3MoeConfig()}
    for name, config in families.items():
        found = moe_of(name)
        assert (found.num_experts, found.top_k) == (config.num_experts, config.num_experts_per_tok)
        assert found.normalize == (name == "mixtral" or config.norm_topk_prob)
        assert found.intermediate_size == (80 if name == "mixtral" else config.moe_intermediate_size)
        assert found.shared_intermediate_size == getattr(config, "shared_expert_intermediate_size", 0)
        assert all(found.layers)


@pytest.mark.parametrize(("changes", "layers"), [
    ({"decoder_sparse_step": 2}, (False, True, False, True)),
    ({"mlp_only_layers": [1, 3]}, (True, False, True, False)),
    ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
])
def test_which_layers(changes, layers):
    assert moe_of("qwen3_moe", **changes).layers == layers


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_experts": 4, "num_experts_per_tok": 5}, '"num_experts_per_tok" is 5, and there are 4 experts'),
    ({"mlp_only_layers": 3}, '"mlp_only_layers" must be a list of layers, not 3'),
])
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        moe_of("qwen3_moe", **changes)
