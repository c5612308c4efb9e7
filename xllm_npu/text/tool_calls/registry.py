"""The formats of calls, by name. A new one is a file beside this and a line here."""

from __future__ import annotations

from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls.deepseek_v3 import DeepSeekV3, DeepSeekV31
from xllm_npu.text.tool_calls.gemma4 import Gemma4
from xllm_npu.text.tool_calls.glm import Glm45, Glm47
from xllm_npu.text.tool_calls.harmony import Harmony
from xllm_npu.text.tool_calls.hermes import Hermes, Json
from xllm_npu.text.tool_calls.invoke_markup import DEEPSEEK_V4, DEEPSEEK_V32, DEEPSEEK_V41, MINIMAX_M2
from xllm_npu.text.tool_calls.kimi_k2 import KimiK2
from xllm_npu.text.tool_calls.kimi_k3 import KimiK3
from xllm_npu.text.tool_calls.llama3_json import Llama3Json
from xllm_npu.text.tool_calls.minimax_m1 import MiniMaxM1
from xllm_npu.text.tool_calls.mistral import Mistral, MistralList
from xllm_npu.text.tool_calls.pythonic import Pythonic
from xllm_npu.text.tool_calls.qwen3_coder import Qwen3Coder

FORMATS: dict[str, ToolCallFormat] = {
    one.name: one
    for one in (
        Hermes(),
        Qwen3Coder(),
        Llama3Json(),
        Pythonic(),
        Mistral(),
        MistralList(),
        DeepSeekV3(),
        DeepSeekV31(),
        DEEPSEEK_V32,
        DEEPSEEK_V4,
        DEEPSEEK_V41,
        KimiK2(),
        KimiK3(),
        Glm45(),
        Glm47(),
        MiniMaxM1(),
        MINIMAX_M2,
        Harmony(),
        Gemma4(),
        Json(),
    )
}

# What vLLM, SGLang and xLLM call them.
ALIASES: dict[str, str] = {
    "qwen25": "hermes",
    "qwen": "hermes",
    "qwen2": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "qwen35": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45",
    "glm5": "glm47",
    "minimax_m1": "minimax",
    "openai": "gpt_oss",
    "harmony": "gpt_oss",
}
