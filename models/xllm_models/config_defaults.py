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
_DEEPSEEK = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}
_DEEPSEEK_V3 = {**_DEEPSEEK, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 4096}
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
    "deepseek_v2": {**_DEEPSEEK, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048},
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": {
        **_DEEPSEEK_V3, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
    },
    "youtu": {
        **_DEEPSEEK, "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "attention_bias": True, "rope_theta": 150000.0,
        "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",  # of its tensors; published configurations do not say it
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
