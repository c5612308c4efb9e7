"""ModelConfig against what transformers itself writes and reads."""

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from xllm_models.config import ModelConfig, ModelConfigError, architecture_of

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 3e-5,
}
CLASSES = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "MistralForCausalLM": MistralConfig,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
}


def write(directory, config, generation=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def tiny(**changes):
    """config.json in the spelling of transformers 4."""
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY, "torch_dtype": "float16"}
    return {k: v for k, v in (base | changes).items() if v is not ...}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", CLASSES)
def test_reads_what_transformers_saves(tmp_path, architecture, rope):
    saved = CLASSES[architecture](
        **TINY, rope_parameters=dict(ROPES[rope]), architectures=[architecture], dtype="bfloat16"
    )
    saved.save_pretrained(tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    assert (config.architecture, config.model_type) == (architecture, expected.model_type)
    for ours, theirs in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "max_position_embeddings": "max_position_embeddings",
        "rms_norm_eps": "rms_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
        "hidden_act": "hidden_act",
        "bos_token_id": "bos_token_id",
        "pad_token_id": "pad_token_id",
    }.items():
        assert getattr(config, ours) == getattr(expected, theirs), ours
    assert config.head_dim == (getattr(expected, "head_dim", None) or 8)
    assert config.eos_token_ids == (() if expected.eos_token_id is None else (expected.eos_token_id,))
    assert config.torch_dtype == "bfloat16"
    parameters = expected.rope_parameters
    assert config.rope.type == parameters["rope_type"] == rope
    for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if key in parameters:
            assert getattr(config.rope, key) == parameters[key]
    assert config.rope.theta == parameters["rope_theta"]
    if rope != "default":
        assert config.rope.cos_sin_scale == pytest.approx(ROPE_INIT_FUNCTIONS[rope](expected)[1])


@pytest.mark.parametrize(
    ("architecture", "qkv", "output", "mlp", "qk_norm"),
    [
        ("LlamaForCausalLM", False, False, False, False),
        ("Qwen2ForCausalLM", True, False, False, False),
        ("Qwen3ForCausalLM", False, False, False, True),
        ("MistralForCausalLM", False, False, False, False),
    ],
)
def test_biases_and_norms_by_architecture(tmp_path, architecture, qkv, output, mlp, qk_norm):
    CLASSES[architecture](**TINY, architectures=[architecture]).save_pretrained(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    got = (config.attention_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm)
    assert got == (qkv, output, mlp, qk_norm)


def test_llama_biases_are_switched_on_by_config():
    config = ModelConfig.from_dict(tiny(attention_bias=True, mlp_bias=True))
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 12345.0}, {"theta": 12345.0, "type": "default"}),
        ({}, {"theta": 10000.0, "type": "default"}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, {"original_max_position_embeddings": 256}),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {k: v for k, v in ROPES["llama3"].items() if k != "rope_theta"},
            },
            {"theta": 5e5, "type": "llama3", "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "original_max_position_embeddings": 64,
                    "truncate": False,
                }
            },
            {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        ),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "rope_theta": 8.0}, {"theta": 7.0}),
        ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
    ],
)
def test_rope_spellings(given, expected):
    rope = ModelConfig.from_dict(tiny(**given)).rope
    assert {key: getattr(rope, key) for key in expected} == expected


def test_yarn_scale_from_mscale_and_from_attention_factor(tmp_path):
    for extra in ({"mscale": 1.0, "mscale_all_dim": 0.8}, {"attention_factor": 0.7}, {}):
        parameters = ROPES["yarn"] | extra
        theirs = LlamaConfig(**TINY, rope_parameters=dict(parameters))
        ours = ModelConfig.from_dict(tiny(rope_parameters=parameters)).rope
        assert ours.cos_sin_scale == pytest.approx(ROPE_INIT_FUNCTIONS["yarn"](theirs)[1])
    assert ModelConfig.from_dict(tiny()).rope.cos_sin_scale == 1.0


@pytest.mark.parametrize(
    ("rope", "length"), [("default", 256), ("llama3", 256), ("linear", 512), ("dynamic", 1024), ("yarn", 256)]
)
def test_context_length_by_rope_type(rope, length):
    assert ModelConfig.from_dict(tiny(rope_parameters=ROPES[rope])).max_context_length == length


@pytest.mark.parametrize(
    ("model_type", "given", "window", "layers"),
    [
        ("mistral", {"sliding_window": 16}, 16, (16,) * 4),
        ("mistral", {"sliding_window": None}, 0, (0,) * 4),
        ("mistral", {}, 4096, (4096,) * 4),
        ("llama", {"sliding_window": 16}, 0, (0,) * 4),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 0, (0,) * 4),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            16,
            (0, 0, 0, 16),
        ),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16, (16,) * 4),
        (
            "qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            16,
            (16, 0, 16, 0),
        ),
    ],
)
def test_sliding_windows(model_type, given, window, layers):
    name = f"{model_type.capitalize()}ForCausalLM"
    config = ModelConfig.from_dict(tiny(architectures=[name], model_type=model_type, **given))
    assert (config.sliding_window, config.layer_sliding_windows) == (window, layers)


@pytest.mark.parametrize("window", [None, 16])
def test_sliding_windows_as_transformers_saves_them(tmp_path, window):
    MistralConfig(**TINY, sliding_window=window, architectures=["MistralForCausalLM"]).save_pretrained(
        tmp_path
    )
    assert ModelConfig.from_dir(tmp_path).sliding_window == (window or 0)
    Qwen2Config(
        **TINY, sliding_window=16, use_sliding_window=window is not None, max_window_layers=1
    ).save_pretrained(tmp_path)
    expected = (0, 16, 16, 16) if window else (0, 0, 0, 0)
    assert ModelConfig.from_dir(tmp_path).layer_sliding_windows == expected


def test_generation_config_adds_eos_ids_and_defaults(tmp_path):
    generation = {
        "eos_token_id": [7, 5],
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.1,
    }
    config = ModelConfig.from_dir(write(tmp_path, tiny(eos_token_id=5, bos_token_id=1), generation))
    assert config.eos_token_ids == (5, 7)
    defaults = config.generation
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.6, 0.9, 40, None)
    assert defaults.repetition_penalty == 1.1


def test_absent_special_tokens_are_transformers_defaults_and_null_is_none():
    assert ModelConfig.from_dict(tiny()).eos_token_ids == (2,)  # LlamaConfig's own
    assert ModelConfig.from_dict(tiny(eos_token_id=None)).eos_token_ids == ()


def test_qwen3_head_dim_does_not_follow_from_hidden_size():
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert ModelConfig.from_dict(tiny(**qwen3)).head_dim == 128
    assert ModelConfig.from_dict(tiny(**qwen3, head_dim=16)).head_dim == 16


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"vocab_size": ...}, ["vocab_size", "config.json", "LlamaForCausalLM"]),
        ({"hidden_size": "big"}, ["hidden_size", "'big'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "num_attention_heads=4"]),
        ({"hidden_size": 33}, ["head_dim", "hidden_size=33"]),
        ({"head_dim": 7}, ["head_dim", "even"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn", "bfloat16"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"rope_scaling": {"type": "su", "factor": 2}}, ["rope_scaling", "su", "default", "llama3", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "rope_scaling"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "layer"]),
        ({"rope_theta": -1}, ["rope_theta"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"architectures": ..., "model_type": ...}, ["architectures"]),
        ({"model_type": "mistral", "sliding_window": -3}, ["sliding_window"]),
        (
            {"model_type": "qwen2", "sliding_window": 4, "layer_types": ["sliding_attention"] * 4},
            ["layer_types", "use_sliding_window"],
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            ["layer_types", "4 layers"],
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
            ["layer_types", "linear_attention"],
        ),
    ],
)
def test_errors_name_the_key(changes, names):
    with pytest.raises(ModelConfigError) as error:
        ModelConfig.from_dict(tiny(**changes))
    for name in names:
        assert name in str(error.value)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=f"{tmp_path}/config.json cannot be read"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="holds a list"):
        ModelConfig.from_dir(tmp_path)
    write(tmp_path, tiny(), {"top_p": "high"})
    with pytest.raises(ModelConfigError, match=r"generation_config\.json.*top_p"):
        ModelConfig.from_dir(tmp_path)


def test_architecture_is_known_where_nothing_else_is():
    assert architecture_of({"architectures": ["GPT2LMHeadModel"], "n_embd": 8}) == "GPT2LMHeadModel"
    assert architecture_of({"model_type": "qwen2"}) == "Qwen2ForCausalLM"


def test_importing_reaches_neither_torch_nor_transformers():
    code = (
        "import sys, xllm_models.config, xllm_models.hub;"
        "found = [m for m in ('torch', 'transformers', 'gguf', 'numpy') if m in sys.modules];"
        "sys.exit(repr(found) if found else 0)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stderr
