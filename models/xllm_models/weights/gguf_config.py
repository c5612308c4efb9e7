"""GGUF metadata as the config.json and generation_config.json that say the same.

Mistral models carry llama.cpp's architecture "llama"; one with a sliding window becomes a MistralForCausalLM.
Llama 3's frequency scaling is stored as a tensor of factors, from which its parameters are recovered.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from xllm_models.weights.gguf_file import GgufError, GgufFile

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DTYPES = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}  # all others: bfloat16
# Tokens that end a turn even where the metadata does not say so, as llama.cpp has it.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>")
_CONTROL = 3  # token type
_LLAMA3_USUAL = (1.0, 4.0, 8192)  # low and high frequency factor, original context of every Llama 3 published


def hf_config_of(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, generation_config.json) of a .gguf file. Raises GgufError."""
    return hf_config(GgufFile(path))


def hf_config(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    heads = file.count("attention.head_count")
    hidden_size = file.count("embedding_length")
    head_dim = file.count("attention.key_length", hidden_size // heads)
    window = file.model("attention.sliding_window", None) or None
    is_mistral = file.architecture == "llama" and window is not None
    ids = {
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": _eos_ids(file),
        "pad_token_id": file.token_id("padding"),
    }
    config = {
        "architectures": ["MistralForCausalLM" if is_mistral else _CLASSES[file.architecture]],
        "model_type": "mistral" if is_mistral else file.architecture,
        "vocab_size": file.tensor_shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.count("feed_forward_length"),
        "num_hidden_layers": file.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": file.model("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": window,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_rope(file, head_dim),
        "torch_dtype": _dtype(file),
        **ids,
    }
    if file.architecture != "llama" and window is not None:
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    return config, {key: value for key, value in ids.items() if value not in (None, [])}


def _eos_ids(file: GgufFile) -> int | list[int]:
    stated = [file.token_id(name) for name in ("eos", "eot", "eom")]
    tokens, types = file.get("tokenizer.ggml.tokens", []), file.get("tokenizer.ggml.token_type", [])
    found = [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_OF_TURN]
    ids = list(dict.fromkeys(i for i in [*stated, *found] if i is not None))
    return ids[0] if len(ids) == 1 else ids


def _dtype(file: GgufFile) -> str:
    weight = file.tensors.get("blk.0.attn_q.weight") or file.tensors["token_embd.weight"]
    return _DTYPES.get(weight.tensor_type, "bfloat16")


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """In the spelling that every version of transformers reads."""
    theta = file.model("rope.freq_base", 10000.0)
    rotary_dim = file.count("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _rope_scaling(file, theta)}
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    return rope


def _rope_scaling(file: GgufFile, theta: float) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        factors = np.asarray(file.tensors["rope_freqs.weight"].data, np.float64)  # [rotary_dim / 2]
        return _llama3_parameters(file, factors, theta)
    kind = file.model("rope.scaling.type", "none")
    factor = file.model("rope.scaling.factor", None)
    if factor is None and (
        old := file.model("rope.scale_linear", None)
    ):  # files from before scaling had a type
        kind, factor = "linear", old
    if kind == "none" or factor in (None, 0.0, 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise GgufError(
            f'{file.path} scales rotary embeddings by "{kind}"; supported: none, linear, yarn, llama3. '
            "Use the model's Hugging Face directory."
        )
    scaling = {"rope_type": kind, "factor": factor}
    return scaling | _yarn_parameters(file, factor) if kind == "yarn" else scaling


def _yarn_parameters(file: GgufFile, factor: float) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for key, name in (
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ):
        if value := file.model(key, None):
            parameters[name] = value
    scale = file.model("rope.scaling.yarn_attn_factor", None) or file.model("rope.scaling.attn_factor", None)
    if scale:  # llama.cpp multiplies yarn's own magnitude by it
        parameters["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
    return parameters


def _llama3_parameters(file: GgufFile, factors: np.ndarray, theta: float) -> dict[str, Any]:
    """The llama3 scaling whose division of the inverse frequencies is `factors`, [rotary_dim / 2]."""
    inv_freq = theta ** (-np.arange(len(factors)) / len(factors))
    factor = round(float(factors.max()), 4)  # computed in 32 bits by whoever wrote it
    for low, high, original in (_LLAMA3_USUAL, _fit_llama3(inv_freq, factors, factor)):
        if np.allclose(_llama3_factors(inv_freq, factor, low, high, original), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise GgufError(
        f"{file.path}: rope_freqs.weight is no llama3 scaling. Use the model's Hugging Face directory."
    )


def _llama3_factors(
    inv_freq: np.ndarray, factor: float, low: float, high: float, original: float
) -> np.ndarray:
    """What llama3 scaling divides each inverse frequency by: 1 for short waves, `factor` for long ones."""
    rotations = original * inv_freq / (2 * math.pi)  # within the original context
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _fit_llama3(inv_freq: np.ndarray, factors: np.ndarray, factor: float) -> tuple[float, float, int]:
    """Only ratios of the three parameters show in the factors, so low is taken as 1."""
    between = (factors > 1.0 + 1e-4) & (factors < factor * (1 - 1e-4))
    if factor <= 1 or between.sum() < 2:
        return _LLAMA3_USUAL
    smooth = (1.0 / factors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(inv_freq[between] / (2 * math.pi), smooth, 1)
    spread = -1.0 / offset  # smooth = (rotations - 1) / spread
    return 1.0, round(1.0 + spread, 4), round(slope * spread)
