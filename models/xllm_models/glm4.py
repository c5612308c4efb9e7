"""GLM-4: half of each head is rotated, as neighbouring pairs; the 0414 models (Glm4) have norms behind each part too.

The configuration carries the rest (biases on q, k and v, fused gate and up); see ModelConfig. GlmForCausalLM is the
older glm-4-9b in transformers' own layout.
"""

from __future__ import annotations

from xllm_models.layers.decoder import SandwichLayer
from xllm_models.llama import LlamaForCausalLM


class Glm4Layer(SandwichLayer):
    norm_names = {
        "input_norm": "input_layernorm", "attention_output_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm", "mlp_output_norm": "post_mlp_layernorm",
    }


class GlmForCausalLM(LlamaForCausalLM):
    """glm-4-9b-chat-hf."""


class Glm4ForCausalLM(LlamaForCausalLM):
    """GLM-4-0414."""

    layer_class = Glm4Layer
