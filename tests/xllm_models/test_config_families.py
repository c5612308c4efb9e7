"""What each family's configuration says beyond Llama's, against what transformers assumes and saves."""

import json

import pytest
from transformers import CONFIG_MAPPING
from xllm_models import config_defaults
from xllm_models.config import ModelConfig, ModelConfigError

TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256}
NAMES = {"phi3": "Phi3ForCausalLM", "glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM",
         "glm4_moe": "Glm4MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
         "gpt_oss": "GptOssForCausalLM"}
IN_ROPE = ("rope_theta", "partial_rotary_factor")  # transformers moves these into rope_parameters


def tiny(model_type, **changes):
    return {"architectures": [NAMES[model_type]], "model_type": model_type, **TINY, **changes}


@pytest.mark.parametrize("model_type", NAMES)
def test_absent_keys_are_what_transformers_assumes(model_type):
    theirs = CONFIG_MAPPING[model_type]()
    for key, value in config_defaults._DEFAULTS[model_type].items():
        if key in IN_ROPE:
            assert theirs.rope_parameters[key] == value
        elif key == "rope_parameters":
            assert value.items() <= theirs.rope_parameters.items()
        elif key == "torch_dtype":
            assert ModelConfig.from_dict(tiny(model_type)).torch_dtype == value  # transformers looks at the tensors
        elif key == "sliding_window_pattern":
            assert theirs.layer_types.index("full_attention") + 1 == value
        else:
            assert getattr(theirs, key) == value, key


@pytest.mark.parametrize("model_type", NAMES)
def test_reads_what_transformers_saves(model_type, tmp_path):
    saved = CONFIG_MAPPING[model_type](**TINY, architectures=[NAMES[model_type]])
    saved.save_pretrained(tmp_path)
    whole, bare = ModelConfig.from_dir(tmp_path), ModelConfig.from_dict(tiny(model_type))
    for name in whole.__dataclass_fields__:
        if name not in ("raw", "torch_dtype"):
            assert getattr(whole, name) == getattr(bare, name), name
    windows = [saved.sliding_window if kind == "sliding_attention" else 0
               for kind in getattr(saved, "layer_types", None) or [""] * 4]
    assert whole.layer_sliding_windows == tuple(windows)
    eos = saved.eos_token_id
    assert whole.eos_token_ids == tuple(eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert whole.tie_word_embeddings == saved.tie_word_embeddings
    assert whole.rms_norm_eps == saved.rms_norm_eps


@pytest.mark.parametrize(("model_type", "expected"), [
    ("phi3", {"qkv_fused": True, "gate_up_fused": True, "attention_bias": False}),
    ("glm4", {"rope_interleaved": True, "gate_up_fused": True, "attention_bias": True, "attention_output_bias": False}),
    ("glm4_moe", {"rope_interleaved": False, "attention_bias": False, "qk_norm": False}),
    ("gemma2", {"norm": "plus_one", "attention_softcap": 50.0, "logit_softcap": 30.0, "attention_scale": 1 / 16,
                "hidden_act": "gelu_pytorch_tanh", "embedding_scaled": True, "qk_norm": False}),
    ("gemma3_text", {"norm": "plus_one", "attention_softcap": 0.0, "logit_softcap": 0.0, "qk_norm": True}),
    ("gpt_oss", {"norm": "float32", "attention_sinks": True, "attention_output_bias": True}),
])
def test_what_families_add(model_type, expected):
    config = ModelConfig.from_dict(tiny(model_type))
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("given", [{}, {"hidden_activation": None}, {"hidden_act": "silu"}])
def test_gemma_does_not_read_hidden_act(given):
    assert ModelConfig.from_dict(tiny("gemma2", **given)).hidden_act == "gelu_pytorch_tanh"


def test_gemma3_rotary_bases_in_both_spellings():
    old = tiny("gemma3_text", rope_theta=5e5, rope_local_base_freq=500.0,
               rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = tiny("gemma3_text", rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}})
    for given in (old, new):
        config = ModelConfig.from_dict(given)
        assert (config.rope.theta, config.rope.type, config.rope.factor) == (5e5, "linear", 8.0)
        assert config.local_rope is not None
        assert (config.local_rope.theta, config.local_rope.type) == (500.0, "default")
        assert config.max_context_length == 256  # states the length after scaling


def test_gemma3_text_inside_a_model_that_sees(tmp_path):
    """As published: few keys inside, special tokens beside."""
    given = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
             "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 16},
             "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 48,
                             "num_hidden_layers": 7, "sliding_window": 16,
                             "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    config = ModelConfig.from_dir(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.layer_sliding_windows == (16,) * 5 + (0, 16)
    assert config.eos_token_ids == (1, 106)
    assert config.torch_dtype == "bfloat16"
    assert config.tie_word_embeddings


def test_gpt_oss_experts_and_quantization():
    moe = ModelConfig.from_dict(tiny("gpt_oss", num_local_experts=4, experts_per_token=2)).moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.activation, moe.scoring) == (4, 2, "clamped_swiglu", "softmax_top_k")
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    assert ModelConfig.from_dict(tiny("gpt_oss", **quantized)).quantization == "mxfp4"
    for refused in (tiny("phi3", **quantized), tiny("gpt_oss", quantization_config={"quant_method": "fp8"})):
        with pytest.raises(ModelConfigError, match="quantization_config"):
            ModelConfig.from_dict(refused)


@pytest.mark.parametrize(("model_type", "changes", "message"), [
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit.*5.0.*only 7.0"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention.*both ways"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4}}, "long_factor.*list of numbers"),
])
def test_what_cannot_be_served_is_refused(model_type, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(tiny(model_type, **changes))
