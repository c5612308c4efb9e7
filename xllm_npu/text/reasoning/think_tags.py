"""Reasoning between `<think>` and `</think>`, where most models have it.

Newer templates put the opening tag into the prompt, and for a request without thinking the closing one too.
"""

from __future__ import annotations

from xllm_npu.text.tagged_output import ReasoningTags

THINK = ("<think>", "</think>")

DEEPSEEK_R1 = ReasoningTags("deepseek_r1", (THINK,))
QWEN3 = ReasoningTags("qwen3", (THINK,), ends_at_call=True)
