"""The shape that most models' output has: reasoning in tags, then an answer with calls in tags, each of which may lack.

A format of calls and a format of reasoning, which know only their own markup, are put together here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from xllm_npu.text.call_grammar import CallGrammar, Expression
from xllm_npu.text.free_text import Barred, barred, first_marker
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Steps, markers_of
from xllm_npu.text.tool_spec import ToolSpec

_BREAKS = r"\n{0,2}"
_TAIL = 256  # characters of a prompt's end that are looked at


class ToolCallFormat(ABC):
    """How one family of models writes calls. Formats have no state."""

    name: str
    openers: tuple[str, ...] = ()  # each begins markup wherever it stands
    line_openers: tuple[str, ...] = ()  # the same, but only at the beginning of a line
    other_markers: tuple[str, ...] = ()
    trims: bool = False  # see EventList
    # Calls that a grammar holds to: what is around all of them, before each, and between two.
    section: tuple[str, str] = ("", "")
    opener: str = ""
    separator: str = ""
    takes_several: bool = True  # in one turn of the model
    trigger: str = ""  # free text in which this comes up goes on with a call; "" where nothing tells
    json_arguments: bool = True  # as one object; else the schema says how values are written

    @property
    def markers(self) -> tuple[str, ...]:
        """All fixed strings of the markup: vocabularies may have them as special tokens."""
        return self.openers + self.other_markers

    @abstractmethod
    def read(self, parse: Parse, opener: str) -> Steps[None]:
        """Read the markup that `opener`, which has been read, begins, and report its calls by `parse.call`.

        Raises NotMarkup where the text cannot go on like a call.
        """

    @abstractmethod
    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        """The expression of one call of `tool`, as the model writes it after `opener`."""

    def barred_calls(self, grammar: CallGrammar, prompt: str) -> Barred:
        """What free text after `prompt` may not have, that no call begins in it but after `trigger`."""
        return barred(grammar, *(one for one in self.openers if first_marker(grammar, one)[0]))

    def read_output(self, parse: Parse, tags: ReasoningTags | None, prompt: str) -> Steps[None]:
        """Read a whole output that follows `prompt`. Raises EndOfText at its end."""
        return read_tagged(parse, self, tags, prompt)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """`pairs` of tags that reasoning may stand in. `ends_at_call`: a call that is written in it ends it.

    `tokens`: parts of tags that vocabularies have as tokens.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    ends_at_call: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(tag for pair in self.pairs for tag in pair) + self.tokens

    def opened_by(self, prompt: str) -> str | None:
        """The closing tag of reasoning that has begun in the prompt."""
        tail = prompt[-_TAIL:].rstrip()
        return next((end for start, end in self.pairs if tail.endswith(start.rstrip())), None)

    def grammar_before(self, grammar: CallGrammar, prompt: str, for_call: bool, budget: int | None = None,
                       ) -> Expression | None:
        """What comes before an answer or a call: the rest of reasoning that has begun, or perhaps some.

        `budget`: most tokens of it, between the tags.
        """
        end = self.opened_by(prompt)
        if end is not None:
            return grammar.sequence(grammar.text_up_to(end, most=budget), grammar.regex(_BREAKS))
        tail = prompt[-_TAIL:].rstrip()
        if budget == 0 or any(tail.endswith(end) for _, end in self.pairs):
            return None
        start, end = self.pairs[0]
        return grammar.optional(grammar.sequence(start, grammar.text_up_to(end, most=budget), grammar.regex(_BREAKS)))

    def barred_reasoning(self, grammar: CallGrammar) -> Barred:
        """What free text may not have, that no reasoning begins in it."""
        return barred(grammar, *(start for start, _ in self.pairs))

    def can_be_bounded(self, grammar: CallGrammar) -> bool:
        """Whether a grammar can say where the reasoning begins and ends."""
        return True


def read_tagged(parse: Parse, calls: ToolCallFormat | None, tags: ReasoningTags | None, prompt: str) -> Steps[None]:
    """Read a whole output. Raises EndOfText at its end."""
    if tags is not None:
        yield from _read_reasoning(parse, calls, tags, tags.opened_by(prompt))
    yield from _read_answer(parse, calls)


def _read_reasoning(parse: Parse, calls: ToolCallFormat | None, tags: ReasoningTags, end: str | None) -> Steps[None]:
    reader, events = parse.reader, parse.events
    space = yield from reader.space()
    starts = [start for start, _ in tags.pairs]
    start = yield from reader.accept(*starts)  # some repeat what is in the prompt
    if start is not None:
        end = dict(tags.pairs)[start]
    if end is None:
        events.content(space)
        return
    events.begin_reasoning()
    openers = calls.openers if calls is not None and tags.ends_at_call else ()
    markers = markers_of((end, *openers))
    while True:
        found = yield from reader.until(markers, events.reasoning)
        if found == end:
            break
        assert calls is not None
        if (yield from parse.attempt(calls.read(parse, found), found, events.reasoning)):
            break
    events.end_reasoning()


def _read_answer(parse: Parse, calls: ToolCallFormat | None) -> Steps[None]:
    reader, events = parse.reader, parse.events
    while calls is None:
        rest = yield from reader.rest()
        events.content(rest)
    markers = markers_of(calls.openers + calls.line_openers)
    while True:
        opener = yield from reader.until(markers, events.content)
        if opener in calls.line_openers and not events.at_line_start:
            events.content(opener)
        else:
            yield from parse.attempt(calls.read(parse, opener), opener, events.content)

