"""GLM-4.5 and 4.6: Llama's layer with half of each head rotated, and sigmoid-scored experts beside a shared one.

The configuration carries those differences; see ModelConfig and MoeConfig. Layers beyond num_hidden_layers, which
predict further tokens, are not loaded.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4-MoE."""
