"""Qwen2 with sparse MLPs: many small experts, and one that all tokens visit behind a sigmoid gate.

The configuration carries those differences; see ModelConfig and MoeConfig.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """Qwen2Moe."""
