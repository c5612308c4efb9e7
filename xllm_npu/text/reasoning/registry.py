"""The formats of reasoning, by name. A new one is a line here, with a file beside it if it needs one."""

from __future__ import annotations

from xllm_npu.text.envelope import Envelope
from xllm_npu.text.reasoning.tags import DEEPSEEK_R1, GEMMA4, GLM45, KIMI_K2, MINIMAX_M2, MISTRAL, QWEN3
from xllm_npu.text.tagged_output import ReasoningTags
from xllm_npu.text.tool_calls.registry import FORMATS as TOOL_CALL_FORMATS

FORMATS: dict[str, ReasoningTags | Envelope] = {
    **{one.name: one for one in (DEEPSEEK_R1, QWEN3, GLM45, KIMI_K2, MINIMAX_M2, MISTRAL, GEMMA4)},
    **{name: one for name, one in TOOL_CALL_FORMATS.items() if isinstance(one, Envelope)},
}

# What vLLM, SGLang and xLLM call them.
ALIASES: dict[str, str] = {
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_r1",
    "qwen3_thinking": "qwen3",
    "glm47": "glm45",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "minimax_m2_append_think": "minimax_m2",
    "magistral": "mistral",
    "openai_gptoss": "gpt_oss",
    "openai": "gpt_oss",
    "harmony": "gpt_oss",
}
