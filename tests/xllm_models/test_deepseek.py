"""DeepSeek's networks beyond what all models are tested for: checkpoints, prefixes, block sizes, compiled decode."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from xllm_models.backends import attention_for
from xllm_models.config import ModelConfig, ModelConfigError
from xllm_models.layers.sharding import ShardingError, check_sharding
from xllm_models.registry import build_model

from tests.support.paged_model import PagedModel
from tests.support.tiny_model import make_tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 0.707, "mscale_all_dim": 1.0}


def tokens(count, seed):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    """(directory, transformers' model)"""
    directory = make_tiny_model(tmp_path_factory.mktemp("v3"), "deepseek_v3", rope_parameters=YARN, layers=3)
    return directory, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def expected_logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 128])
@pytest.mark.parametrize("attention", ["numba", "torch"])
def test_block_sizes(v3, block_size, attention):
    directory, model = v3
    paged = PagedModel(directory, block_size=block_size, num_blocks=200, attention=attention)
    ids = tokens(90, 1)
    ours = [paged.logits([(0, ids[:50])])[0], paged.logits([(0, ids[50:80])])[0]]
    ours += [paged.logits([(0, [t])])[0] for t in ids[80:]]
    close(torch.cat(ours), expected_logits(model, ids))


def test_a_shared_prefix_is_read_by_whoever_has_its_blocks(v3):
    directory, model = v3
    paged, prefix = PagedModel(directory), tokens(48, 2)
    paged.logits([(0, prefix)])
    endings = [tokens(n, n) for n in (1, 7, 30)]
    for sequence in (1, 2, 3):
        paged.blocks.tables[sequence] = list(paged.blocks.tables[0])
        paged.blocks.lengths[sequence] = len(prefix)
    for ours, ending in zip(paged.logits([(i + 1, e) for i, e in enumerate(endings)]), endings):
        close(ours, expected_logits(model, prefix + ending)[len(prefix) :])


def test_layers_that_predict_further_tokens_are_not_loaded(v3, tmp_path):
    directory, model = v3
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    last = {name: t.clone() for name, t in tensors.items() if ".layers.2." in name}
    further = {name.replace(".layers.2.", ".layers.3."): t for name, t in last.items()}
    save_file(tensors | further | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, file, {"format": "pt"})
    paged, ids = PagedModel(tmp_path), tokens(20, 3)
    assert paged.report.tensors == len(tensors)
    close(paged.logits([(0, ids)])[0], expected_logits(model, ids))


def test_one_tensor_an_expert_is_what_checkpoints_have(v3):
    names = load_file(v3[0] / "model.safetensors")
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_layers_equal_eager_ones(v3):
    from torch._dynamo.utils import counters

    eager, compiled = PagedModel(v3[0]), PagedModel(v3[0])
    prompts = [tokens(20 + i, i) for i in range(4)]
    for paged in (eager, compiled):
        paged.logits(list(enumerate(prompts)))
    torch._dynamo.reset()
    counters.clear()
    compiled.forward = compiled.model.compile_decode()
    for size in (1, 3, 4, 2):
        rows = [(i, [i + 5]) for i in range(size)]
        for ours, expected in zip(compiled.logits(rows), eager.logits(rows)):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)
    assert counters["stats"]["unique_graphs"] <= 6
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_the_cache_holds_one_latent_a_token(v3):
    config = ModelConfig.from_path(v3[0])
    model = build_model(config, dtype=torch.bfloat16)
    spec = model.attention_spec(16)
    assert attention_for(config, "numba").kv_bytes_per_block(spec) == 3 * 16 * (24 + 8) * 2
    assert (config.num_kv_heads, config.head_dim, config.rotary_head_dim) == (1, 24, 8)


def test_heads_are_cut_and_sizes_that_cannot_be_are_refused(v3):
    config = ModelConfig.from_path(v3[0])
    check_sharding(config, 4)
    with pytest.raises(ShardingError, match=r"tp_size=3.*sizes that work: 1, 2, 4\."):
        check_sharding(config, 3)


HUB_V2_LITE = {  # the published config.json, without what has no say here
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128,
    "vocab_size": 102400,
}
HUB_V3 = {
    **HUB_V2_LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "vocab_size": 129280,
    "rope_scaling": {**HUB_V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
}


def test_published_configurations():
    config = ModelConfig.from_dict(HUB_V2_LITE)
    assert config.max_context_length == 163840
    assert config.mla.q_lora_rank is None
    assert (config.mla.cache_width, config.head_dim) == (576, 192)
    assert config.rope.cos_sin_scale == 1.0
    assert config.rope.latent_score_scale == pytest.approx(1.26081**2, rel=1e-4)  # 0.1 * 0.707 * ln(40) + 1
    moe = config.moe
    assert moe.layers == (False,) + (True,) * 26
    assert (moe.scoring, moe.normalize, moe.num_groups, moe.shared_intermediate_size) == ("softmax", False, 1, 2816)

    config = ModelConfig.from_dict(HUB_V3)
    assert config.rope.latent_score_scale == pytest.approx(1.36889**2, rel=1e-4)
    assert config.mla.q_lora_rank == 1536
    moe = config.moe
    assert moe.layers.count(False) == 3
    assert (moe.num_groups, moe.top_groups, moe.group_score, moe.scaling_factor) == (8, 4, "top2_sum", 2.5)
    assert (moe.scoring, moe.normalize, moe.correction_bias) == ("sigmoid", True, True)
    kimi = ModelConfig.from_dict({**HUB_V3, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1})
    assert (kimi.mla, kimi.moe.num_groups, kimi.moe.scoring) == (config.mla, 1, "sigmoid")


@pytest.mark.parametrize(("changes", "message"), [
    ({"qk_rope_head_dim": 63}, '"qk_rope_head_dim" must be even'),
    ({"topk_method": "noaux_tc"}, '"topk_method" is "noaux_tc"; supported: greedy, group_limited_greedy'),
    ({"topk_method": "group_limited_greedy", "n_group": 5}, '"n_group" is 5, which must divide the 64 experts'),
    ({"kv_lora_rank": 0}, '"kv_lora_rank" must be a positive whole number'),
    ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantized"),
])
def test_what_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict({**HUB_V2_LITE, **changes})


def test_an_unknown_model_type_is_refused():
    config = ModelConfig.from_dict({**HUB_V3, "model_type": "deepseek_v9"})
    with pytest.raises(ModelConfigError, match=r'model_type "deepseek_v9" has none. Set model_type to one of .*_v3'):
        build_model(config, dtype=torch.float32)


def test_a_dense_network_has_no_experts():
    config = ModelConfig.from_dict({**HUB_V2_LITE, "n_routed_experts": None})
    assert config.moe is None


def test_head_dim_of_a_saved_configuration_has_no_say(v3):
    saved = json.loads((v3[0] / "config.json").read_text())
    assert ModelConfig.from_dict({k: v for k, v in saved.items() if k != "head_dim"}) == ModelConfig.from_dict(saved)
