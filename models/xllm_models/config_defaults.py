"""What transformers assumes for keys that a config.json leaves out, by model type, and where a text model's keys lie.

Only values that differ between families are here; the rest is where the key is read. Knows JSON objects only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GLM_EOS = [151329, 151336, 151338]
_GEMMA = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}
_GLM = {
    "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07,
    "attention_bias": True, "eos_token_id": _GLM_EOS, "pad_token_id": 151329, "max_position_embeddings": 131072,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4096},
    "mixtral": {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "qwen2_moe": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": {"sliding_window": 4096},
    "phi3": {
        "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    },
    "gemma2": {
        **_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": {
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "gpt_oss": {
        "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0,
        "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's keys, absent ones filled in; a null stays a null."""
    text = config.get("text_config")
    if isinstance(text, Mapping):  # a model that also sees: names and special tokens are beside, the network is inside
        config = {**text, **{key: config[key] for key in _OUTSIDE if key in config}}
    return _DEFAULTS.get(str(config.get("model_type")), {}) | dict(config)


_OUTSIDE = (
    "architectures", "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "tie_word_embeddings",
    "quantization_config",
)
