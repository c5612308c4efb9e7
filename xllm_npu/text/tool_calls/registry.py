"""The formats of calls, by name. A new one is a file beside this and a line here."""

from __future__ import annotations

from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls.hermes import Hermes

FORMATS: dict[str, ToolCallFormat] = {
    one.name: one
    for one in (
        Hermes(),
    )
}

# Names that vLLM has for formats that have another one here.
ALIASES: dict[str, str] = {}
