"""Mistral: Llama with a sliding window in every layer (version 0.1) or none (later ones).

The configuration carries those differences; see ModelConfig.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral."""
