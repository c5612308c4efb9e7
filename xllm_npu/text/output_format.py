"""Which markup a model writes, chosen once when the model is loaded; it makes the parser of each sequence.

`output_format` takes names (vLLM's too) or "auto", which looks at the model. Knows no API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from xllm_npu.text.call_grammar import CallGrammar, Expression
from xllm_npu.text.envelope import Envelope
from xllm_npu.text.free_text import NOTHING_BARRED, Calls, FreeText
from xllm_npu.text.model_hints import ModelHints, format_of_calls, format_of_reasoning
from xllm_npu.text.output_parser import OutputParser, Parse
from xllm_npu.text.reasoning import registry as reasoning_formats
from xllm_npu.text.tagged_output import ReasoningTags, ToolCallFormat, read_tagged
from xllm_npu.text.tool_calls import registry as tool_call_formats
from xllm_npu.text.tool_spec import ToolSpec

AUTO, NONE = "auto", "none"

__all__ = ["ModelHints", "OutputFormat", "ToolSpec", "output_format"]

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The formats of one model; either may lack."""

    calls: ToolCallFormat | None
    reasoning: ReasoningTags | Envelope | None
    marker_ids: Mapping[str, int] = field(default_factory=dict)

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
        tags = self.reasoning if reasoning else None
        parse = Parse(tools if calls is not None else (), calls.trims if calls is not None else False)
        envelope = next((one for one in (self.calls, self.reasoning) if isinstance(one, Envelope)), None)
        if envelope is not None:
            return OutputParser(parse, envelope.read_all(parse, tags is not None, prompt))
        assert not isinstance(tags, Envelope)
        return OutputParser(parse, read_tagged(parse, calls, tags, prompt))

    @property
    def bounds_reasoning(self) -> bool:
        """Whether a grammar can end the model's reasoning."""
        return self.reasoning is not None and self.reasoning.can_be_bounded(CallGrammar(self.marker_ids))

    @property
    def triggers_calls(self) -> bool:
        """Whether a call can be told from the free text before it."""
        calls = self.calls
        if calls is None or not calls.trigger:
            return False
        return not isinstance(calls, Envelope) or calls.can_be_bounded(CallGrammar(self.marker_ids))

    def reasoning_grammar(self, prompt: str, for_call: bool, budget: int | None = None) -> str | None:
        """Lark for llguidance: what the model may write after `prompt` before its answer begins, or with `for_call`
        its first call; a grammar of the answer goes after it. None if nothing comes before.

        `budget`: most tokens of reasoning.
        """
        grammar = CallGrammar(self.marker_ids)
        if self.reasoning is None:
            return None
        before = self.reasoning.grammar_before(grammar, prompt, for_call, budget)
        if before is None:
            return None
        grammar.start(before)
        return grammar.text

    def free_grammar(self, prompt: str, budget: int | None, tools: Sequence[ToolSpec], parallel: bool) -> str:
        """Lark for llguidance: a whole output after `prompt` whose answer is free.

        `budget`: most tokens of reasoning, which comes first. With `tools`, for which `triggers_calls` must hold, every
        call that begins with the format's marker is one of them (without `parallel` it is the only one), and has
        arguments as the tool's schema says; those of a tool that is not strict have its parameters' names or are JSON.
        """
        grammar = CallGrammar(self.marker_ids)
        may_not, calls = NOTHING_BARRED, None
        before = self.reasoning.grammar_before(grammar, prompt, True, budget) if self.reasoning is not None else None
        if self.reasoning is not None and budget is not None:
            may_not |= self.reasoning.barred_reasoning(grammar)
        if tools:
            assert self.calls is not None
            held = [tool if tool.strict else tool.loosened(self.calls.json_arguments) for tool in tools]
            may_not |= self.calls.barred_calls(grammar, prompt)
            calls = Calls(self.calls.trigger, self._calls_of(grammar, held, parallel, self.calls.trigger),
                          parallel and self.calls.takes_several)
        free = FreeText(grammar, may_not, calls).expression()
        grammar.start(grammar.sequence(before or "", free))
        return grammar.text

    def forced_call_grammar(self, tools: Sequence[ToolSpec], parallel: bool) -> str:
        """Lark for llguidance: one call of one of `tools` (with `parallel` one or more), as the model writes it, and
        nothing else. Without a format of its own the model writes bare JSON.
        """
        grammar = CallGrammar(self.marker_ids)
        grammar.start(self._calls_of(grammar, tools, parallel))
        return grammar.text

    def _calls_of(self, grammar: CallGrammar, tools: Sequence[ToolSpec], parallel: bool, begun: str = "",
                  ) -> Expression:
        """One call, or with `parallel` one or more. `begun` of it has been written."""
        calls = self.calls or tool_call_formats.FORMATS["json"]
        call = grammar.one_of([grammar.rule(grammar.sequence(calls.grammar_of_call(grammar, tool))) for tool in tools])
        begin, end = calls.section
        more = ""
        if parallel and calls.takes_several:
            more = f"({grammar.sequence(calls.separator + calls.opener, call)})*"
        return grammar.sequence((begin + calls.opener).removeprefix(begun), call, Expression(more), end)


def output_format(tool_parser: str | None, reasoning_parser: str | None, model: ModelHints) -> OutputFormat:
    """The formats of these names; "auto" chooses by the model, None and "none" are no format.

    Raises ValueError, with the names that there are.
    """
    calls = _chosen(tool_parser, "tool_call_parser", format_of_calls(model), tool_call_formats.FORMATS,
                    tool_call_formats.ALIASES)
    tags = _chosen(reasoning_parser, "reasoning_parser", format_of_reasoning(model), reasoning_formats.FORMATS,
                   reasoning_formats.ALIASES)
    return OutputFormat(calls, tags, model.marker_ids)


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
