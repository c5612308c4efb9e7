"""Request fields that this version knows and cannot honour: refused by name rather than silently dropped.

Each entry says which values ask for nothing and therefore pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from xllm_npu.state.sampling_params import InvalidParameter

Harmless = Callable[[Any], bool]


def _off(value: Any) -> bool:
    return not value


def _no_tool(value: Any) -> bool:
    return not value or value in ("none", "auto")


def _text_only(value: Any) -> bool:
    return not value or value == ["text"]


UNSUPPORTED: Mapping[str, Harmless] = {
    "functions": _off,
    "function_call": _no_tool,
    "suffix": _off,
    "prompt_embeds": _off,
    "audio": _off,
    "modalities": _text_only,
    "mm_processor_kwargs": _off,
    "media_io_kwargs": _off,
    "thinking_token_budget": lambda value: value in (None, -1),  # of completions, which know no reasoning
    "kv_transfer_params": _off,
}


HINTS: Mapping[str, str] = {"functions": "Send tools instead.", "function_call": "Send tool_choice instead."}


def refuse_unsupported(body: Mapping[str, Any], supported: Collection[str]) -> None:
    """`supported`: fields of this kind of request, whatever others do not take."""
    for name in UNSUPPORTED.keys() & body.keys() - set(supported):
        if not UNSUPPORTED[name](body[name]):
            raise InvalidParameter(name, " ".join([f"{name} is not supported in this version.", HINTS.get(name, "")])
                                   .rstrip())
