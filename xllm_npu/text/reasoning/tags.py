"""Reasoning between tags, which most models write before their answer.

Many templates put the opening tag into the prompt, and for a request without thinking the closing one too.
"""

from __future__ import annotations

from xllm_npu.text.tagged_output import ReasoningTags

THINK = ("<think>", "</think>")

DEEPSEEK_R1 = ReasoningTags("deepseek_r1", (THINK,))
QWEN3 = ReasoningTags("qwen3", (THINK,), ends_at_call=True)
GLM45 = ReasoningTags("glm45", (THINK,), ends_at_call=True)
KIMI_K2 = ReasoningTags("kimi_k2", (THINK,), ends_at_call=True)
MINIMAX_M2 = ReasoningTags("minimax_m2", (THINK,))
# Magistral 2506 has the plain tags, its successors tokens.
MISTRAL = ReasoningTags("mistral", (("[THINK]", "[/THINK]"), THINK))
GEMMA4 = ReasoningTags("gemma4", (("<|channel>thought\n", "<channel|>"),), tokens=("<|channel>",))
