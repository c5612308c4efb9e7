"""Qwen2 and 2.5: Llama with biases on the query, key and value projections, and a window in the upper layers of some.

The configuration carries those differences; see ModelConfig.
"""

from __future__ import annotations

from xllm_models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2."""
