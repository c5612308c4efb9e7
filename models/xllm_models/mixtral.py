"""Mistral whose MLPs are mixtures of experts: softmax over all, the best two weighted to one.

The configuration carries those differences; see ModelConfig and MoeConfig.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral."""
