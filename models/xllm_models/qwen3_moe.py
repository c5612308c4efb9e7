"""Qwen3 with sparse MLPs in all layers or in those that the configuration names.

The configuration carries those differences; see ModelConfig and MoeConfig.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3Moe."""
