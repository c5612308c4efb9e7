"""Random checkpoints of architectures that this package has no network of, in two layers, with the byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_model import prefer_printable
from tests.support.tiny_tokenizer import EOS, PAD, VOCAB, byte_tokenizer, write_tokenizer

SLIDING = {"sliding_window": 24}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
       "num_key_value_heads": 4}
# model_type -> what its configuration needs beside the common fields
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "starcoder2": SLIDING,
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "stablelm": {},
    "cohere2": MIXED,
    "phi": {},
    "smollm3": {},
    "exaone4": MIXED,
    "ernie4_5": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "seed_oss": {"head_dim": 20},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # experts fused when they are loaded
    "gpt_bigcode": {},  # one key head
    "youtu": MLA,  # keys and values of different widths
    "diffllama": {},  # two attentions a layer
    "mimo_v2_flash": {"head_dim": 16, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 32, **MIXED},  # sinks, and layers that differ in key heads
    "vaultgemma": {"head_dim": 16, **MIXED},  # soft caps
}  # fmt: skip


def make_hf_model(
    directory: Path, model_type: str, *, initializer_range: float = 0.2, seed: int = 0, **config: Any
) -> Path:
    """Write a model directory and return it. `config` overrides fields of transformers' configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    backend = byte_tokenizer()
    write_tokenizer(directory, backend)
    fields = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": initializer_range, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": backend.token_to_id(EOS), "pad_token_id": backend.token_to_id(PAD),
    }  # fmt: skip
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        made = AutoConfig.for_model(model_type, **{**fields, **ARCHITECTURES.get(model_type, {}), **config})
        model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
        for parameter in model.parameters():  # norms and biases are ones and zeros, which hide mistakes
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    finally:
        torch.random.set_rng_state(state)
    if not made.tie_word_embeddings:
        prefer_printable(model.get_output_embeddings().weight, backend)
    model.save_pretrained(directory)
    return directory
