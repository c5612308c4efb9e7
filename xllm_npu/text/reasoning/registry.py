"""The formats of reasoning, by name. A new one is a file beside this and a line here."""

from __future__ import annotations

from xllm_npu.text.reasoning.think_tags import DEEPSEEK_R1, QWEN3
from xllm_npu.text.tagged_output import ReasoningTags

FORMATS: dict[str, ReasoningTags] = {one.name: one for one in (DEEPSEEK_R1, QWEN3)}

# Names that vLLM has for formats that have another one here.
ALIASES: dict[str, str] = {}
