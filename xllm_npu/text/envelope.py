"""Formats in which the whole output is in markup: messages or channels for reasoning, answer and calls.

Such a format is one for calls and for reasoning at a time, under one name.
"""

from __future__ import annotations

from abc import abstractmethod

from xllm_npu.text.call_grammar import CallGrammar, Expression
from xllm_npu.text.free_text import Barred
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Steps
from xllm_npu.text.tagged_output import ToolCallFormat


class Envelope(ToolCallFormat):
    @abstractmethod
    def read_all(self, parse: Parse, with_reasoning: bool, prompt: str) -> Steps[None]:
        """Read a whole output that follows `prompt`. Raises EndOfText at its end.

        Without tools calls are content, and reasoning is content unless `with_reasoning`.
        """

    @abstractmethod
    def grammar_before(self, grammar: CallGrammar, prompt: str, for_call: bool, budget: int | None = None,
                       ) -> Expression | None:
        """What comes before an answer or a call that follows `prompt`; None if nothing does.

        `budget`: most tokens of reasoning.
        """

    @abstractmethod
    def barred_reasoning(self, grammar: CallGrammar) -> Barred:
        """What free text may not have, that no reasoning begins in it."""

    def can_be_bounded(self, grammar: CallGrammar) -> bool:
        """Whether a grammar can say where the reasoning begins and ends."""
        return all(grammar.is_marker(marker) for marker in self.markers)

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        raise AssertionError("an envelope has no openers")
