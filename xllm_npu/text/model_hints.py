"""Which formats a model writes, by what comes with it.

The chat template shows the model its own calls again, so its text names their markup; it counts first. Models whose
maker has a program in place of a template are known by their tokens, or by their architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelHints:
    """The architecture's name, the chat template's text (of several, all), the tokens that are no text to a grammar
    with their ids (see `Tokenizer.marker_ids`), and all added tokens.
    """

    architecture: str = ""
    chat_template: str = ""
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    added_tokens: frozenset[str] = frozenset()


# A template has all of the strings: its model writes this format. The first line that fits counts, so that what says
# more stands before what says less.
_CALLS_IN_TEMPLATE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>", "functions."), "gpt_oss"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("｜DSML｜ calls",), "deepseek_v41"),
    (("｜DSML｜tool_calls",), "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>",), "glm45"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_v3"),
    (("<tool_calls>",), "minimax"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
    (("<|header_start|>", '"parameters"'), "llama3_json"),
)

# The same for the vocabulary's added tokens.
_CALLS_IN_TOKENS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|constrain|>", "<|call|>"), "gpt_oss"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
)

_CALLS_OF_ARCHITECTURE = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GptOssForCausalLM": "gpt_oss",
}

# The reasoning that goes with a format of calls, where there is any.
_REASONING_OF_CALLS = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "glm45": "glm45",
    "glm47": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "mistral_v3": "mistral",
}

_ENVELOPES = frozenset(("gpt_oss", "kimi_k3"))


def format_of_calls(model: ModelHints) -> str:
    """A model that nothing is known of, such as one whose template has no tools, can at best be asked for JSON."""
    return (_first(_CALLS_IN_TEMPLATE, model.chat_template.__contains__)
            or _CALLS_OF_ARCHITECTURE.get(model.architecture)
            or _first(_CALLS_IN_TOKENS, model.added_tokens.__contains__)
            or "json")


def format_of_reasoning(model: ModelHints) -> str | None:
    """None for a model that does not reason."""
    calls = format_of_calls(model)
    if calls in _ENVELOPES:
        return calls
    if "<|channel>thought" in model.chat_template or calls == "gemma4":
        return "gemma4"
    if "[THINK]" in model.chat_template or "[THINK]" in model.added_tokens:
        return "mistral"
    if "</think>" in model.chat_template or "</think>" in model.added_tokens:
        return _REASONING_OF_CALLS.get(calls, "deepseek_r1")
    return "deepseek_r1" if model.architecture in _CALLS_OF_ARCHITECTURE else None


def _first(formats: tuple[tuple[tuple[str, ...], str], ...], has: Callable[[str], bool]) -> str | None:
    return next((name for marks, name in formats if all(map(has, marks))), None)
