"""Formats in which the whole output is in markup: messages or channels for reasoning, answer and calls.

Such a format is one for calls and for reasoning at a time, under one name.
"""

from __future__ import annotations

from abc import abstractmethod

from xllm_npu.text.call_grammar import CallGrammar, Expression
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
    def grammar_before(self, grammar: CallGrammar, prompt: str, for_call: bool) -> Expression | None:
        """What comes before an answer or a call that follows `prompt`; None if nothing does."""

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        raise AssertionError("an envelope has no openers")
