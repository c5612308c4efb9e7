"""Configurations of models whose weights are made up: the shapes of Llama 3.2 1B and Llama 3.1 8B, and a tiny one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_act": "silu",
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "bos_token_id": None, "eos_token_id": 128001, "attention_bias": False, "mlp_bias": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {**_COMMON, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "tie_word_embeddings": True},
    "8B": {**_COMMON, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
           "tie_word_embeddings": False},
    "tiny": {**_COMMON, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260, "eos_token_id": 258,
             "tie_word_embeddings": True},
}  # fmt: skip


def write(folder: Path, shape: str) -> Path:
    """A model directory with a configuration only."""
    directory = folder / shape
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return directory


def weight_bytes_read(shape: str, element_bytes: int = 2) -> int:
    """Of matrices that one decode step reads, whatever its batch: all but the embedding's rows, which it picks."""
    s = SHAPES[shape]
    heads = (s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * s["head_dim"]
    layer = s["hidden_size"] * (heads + s["num_attention_heads"] * s["head_dim"] + 3 * s["intermediate_size"])
    return element_bytes * (s["num_hidden_layers"] * layer + s["hidden_size"] * s["vocab_size"])


def kv_bytes_per_token(shape: str, element_bytes: int = 2) -> int:
    """Keys and values of all layers."""
    s = SHAPES[shape]
    return element_bytes * 2 * s["num_hidden_layers"] * s["num_key_value_heads"] * s["head_dim"]
