"""One sequence's text to events, in whatever pieces it comes.

The result does not depend on the pieces: joined content, joined reasoning and the list of calls are the same for
every cut of a text. A text that is whole from the beginning goes the same way. Parsing never raises for what a model
wrote: text that is no markup after all is content, and markup that the end of the text cut is dropped if the sequence
was cut short, else content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xllm_npu.text.event_list import EventList
from xllm_npu.text.output_events import Event
from xllm_npu.text.output_reader import EndOfText, NotMarkup, Steps, TextReader
from xllm_npu.text.tool_spec import ToolSpec

MAX_NAME = 256


class Parse:
    """What a format's reading works with: the text, the events, and the tools that are offered."""

    __slots__ = ("events", "is_certain", "reader", "tools")

    def __init__(self, tools: Sequence[ToolSpec], trims: bool) -> None:
        self.reader = TextReader()
        self.events = EventList(trims, lambda: self.reader.position)
        self.tools = {tool.name: tool for tool in tools}
        self.is_certain = True  # that what is being read is markup, should the text end in it

    def call(self, name: str, arguments: str, id: str | None = None) -> None:
        """One call is complete. Raises NotMarkup if no tool can have such a name."""
        if name not in self.tools and not is_name(name):
            raise NotMarkup
        self.events.call(name, arguments, id)
        self.reader.keep()

    def attempt(self, steps: Steps[None], opener: str, refuse: Callable[[str], None]) -> Steps[bool]:
        """Read markup that `opener` begins; what of it turns out to be none goes to `refuse`, as it was written.

        Whether there were calls in it. Raises EndOfText.
        """
        before = self.events.num_tool_calls
        self.reader.keep(opener)
        self.is_certain = True
        try:
            yield from steps
            rest = self.reader.kept()  # what was read after the last call
            if rest.isspace():
                refuse(rest)
        except NotMarkup:
            refuse(self.reader.kept())
        except EndOfText:
            text = self.reader.kept()
            made_calls = self.events.num_tool_calls > before
            if (self.reader.cut_short and self.is_certain) or (made_calls and text.isspace()):
                self.events.drop_space()
            else:
                refuse(text)
            raise
        return self.events.num_tool_calls > before


def is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME and text.isprintable() and not any(c.isspace() or c in "<>{}[]\"'`," for c in text)


class OutputParser:
    """`num_tool_calls`: so far."""

    __slots__ = ("_finished", "_parse", "_steps")

    def __init__(self, parse: Parse, steps: Steps[None]) -> None:
        """`steps` reads the whole of the output; the end of the text may raise EndOfText in it."""
        self._parse = parse
        self._steps = steps
        self._finished = False

    @property
    def num_tool_calls(self) -> int:
        return self._parse.events.num_tool_calls

    def is_content(self, offset: int) -> bool | None:
        """Whether the character at `offset` of the text belongs to the answer; None where that is not known yet."""
        return self._parse.events.is_content(offset)

    def push(self, text: str) -> list[Event]:
        """The next piece of the text, of any size. After `finish` there is none."""
        assert not self._finished, "push after finish"
        if text:
            self._parse.reader.push(text)
            self._run()
        return self._parse.events.take()

    def finish(self, cut_short: bool) -> list[Event]:
        """The end of the text. `cut_short`: by length, a stop string or an abort; the model did not end it."""
        if not self._finished:
            self._finished = True
            self._parse.reader.finish(cut_short)
            self._run()
            self._parse.events.finish()
        return self._parse.events.take()

    def _run(self) -> None:
        try:
            next(self._steps)
            assert not self._finished, "a parser waits for text after the end"
        except (StopIteration, EndOfText):
            assert self._finished, "a parser ended before its text"
