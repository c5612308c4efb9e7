"""Qwen3, dense: Llama with an RMS norm on each query and key head before rotation, and heads of their own width.

The configuration carries those differences; see ModelConfig.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3."""
