"""gpt-oss: attention with sinks, every other layer windowed, and experts with biases and a clamped gate.

The configuration carries those differences; see ModelConfig and MoeConfig. MXFP4 checkpoints become the compute dtype
at load (weights.mxfp4).
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss."""
