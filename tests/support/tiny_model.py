"""A random checkpoint that serves in a second: a real architecture, two layers, and a tokenizer of single bytes.

Any text round-trips through the tokenizer, one token a byte. The model's likeliest tokens are printable ASCII, so what
it writes is text that tests can search; its greedy output depends on the whole prompt and is no loop.
Made from transformers' own configurations and `save_pretrained`, so that transformers can load and check it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.tiny_tokenizer import EOS, PAD, VOCAB, byte_tokenizer, write_tokenizer

ARCHITECTURES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

_DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {  # what an architecture's configuration needs beyond, or instead of, all others'
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
}


def make_tiny_model(
    directory: str | Path, architecture: str = "llama", *, vocab: int = VOCAB, layers: int = 2, hidden: int = 64,
    max_length: int = 1024, initializer_range: float = 0.5, seed: int = 0, dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a model directory and return it. `config` overrides fields of transformers' configuration."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    backend = byte_tokenizer()
    write_tokenizer(directory, backend)
    config_class, model_class = ARCHITECTURES[architecture]
    fields = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4, "tie_word_embeddings": False,
        "max_position_embeddings": max_length, "initializer_range": initializer_range, "bos_token_id": None,
        "eos_token_id": backend.token_to_id(EOS), "pad_token_id": backend.token_to_id(PAD),
    }  # fmt: skip
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_class(config_class(**{**fields, **FIELDS.get(architecture, {}), **config})).eval()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.1)
    finally:
        torch.random.set_rng_state(state)
    prefer_printable(model.get_output_embeddings().weight, backend)
    model.to(dtype).save_pretrained(directory)
    return directory


def prefer_printable(weight: torch.Tensor, backend: Tokenizer) -> None:
    """Give every other token the logit 0, which the likeliest of some ninety random ones is always above."""
    printable = [i for t, i in backend.get_vocab().items() if (len(t) == 1 and "!" <= t <= "~") or t == "Ġ"]
    keep = torch.zeros(weight.shape[0], 1)  # [vocab, 1]
    keep[printable] = 1
    with torch.no_grad():
        weight.mul_(keep)
