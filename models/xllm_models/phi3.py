"""Phi-3, 3.5 and Phi-4 (mini): Llama whose checkpoints fuse q, k, v and gate, up; with longrope for long contexts.

The configuration carries those differences; see ModelConfig.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3."""
