"""Which markup a model writes, chosen once when the model is loaded; it makes the parser of each sequence.

`output_format` takes names (vLLM's too) or "auto", which looks at the model. Knows no API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from xllm_npu.text.output_parser import OutputParser, Parse
from xllm_npu.text.reasoning import registry as reasoning_formats
from xllm_npu.text.tagged_output import ReasoningTags, ToolCallFormat, read_tagged
from xllm_npu.text.tool_calls import registry as tool_call_formats
from xllm_npu.text.tool_spec import ToolSpec

AUTO, NONE = "auto", "none"

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class ModelHints:
    """What says which formats a model writes: its architecture's name, the chat template's text (of several, all),
    the special tokens with their ids, and all added tokens.
    """

    architecture: str = ""
    chat_template: str = ""
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    added_tokens: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The formats of one model; either may lack."""

    calls: ToolCallFormat | None
    reasoning: ReasoningTags | None
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def name_of_tools(self) -> str | None:
        return self.calls.name if self.calls else None

    @property
    def name_of_reasoning(self) -> str | None:
        return self.reasoning.name if self.reasoning else None

    @property
    def shown_special_tokens(self) -> frozenset[str]:
        """Markers: where a vocabulary has them as special tokens, they must not be skipped in the text."""
        return frozenset(marker for one in (self.calls, self.reasoning) if one is not None for marker in one.markers)

    def parser(self, tools: Sequence[ToolSpec], prompt: str, reasoning: bool = True) -> OutputParser:
        """The parser of one sequence that follows `prompt`, whose end says whether the reasoning has begun.

        Without tools the markup of calls is content; so is all reasoning where `reasoning` is false.
        """
        calls = self.calls if tools else None
        parse = Parse(tools, calls.trims if calls is not None else False)
        return OutputParser(parse, read_tagged(parse, calls, self.reasoning if reasoning else None, prompt))


def output_format(tool_parser: str | None, reasoning_parser: str | None, model: ModelHints) -> OutputFormat:
    """The formats of these names; "auto" chooses by the model, None and "none" are no format.

    Raises ValueError, with the names that there are.
    """
    calls = _chosen(tool_parser, "tool_call_parser", _auto_calls(model), tool_call_formats.FORMATS,
                    tool_call_formats.ALIASES)
    tags = _chosen(reasoning_parser, "reasoning_parser", _auto_reasoning(model), reasoning_formats.FORMATS,
                   reasoning_formats.ALIASES)
    return OutputFormat(calls, tags, model.special_tokens)


def _chosen(name: str | None, flag: str, auto: str | None, formats: Mapping[str, F],
               aliases: Mapping[str, str]) -> F | None:
    word = (name or NONE).lower().replace("-", "_")
    if word == AUTO:
        word = auto or NONE
    if word == NONE:
        return None
    found = formats.get(aliases.get(word, word))
    if found is None:
        known = ", ".join(sorted({*formats, *aliases}))
        raise ValueError(f"{flag} has no format {name!r}. There are auto, none, {known}.")
    return found


def _auto_calls(model: ModelHints) -> str | None:
    return "hermes" if "<tool_call>" in model.chat_template else None


def _auto_reasoning(model: ModelHints) -> str | None:
    return "qwen3" if "</think>" in model.chat_template else None
