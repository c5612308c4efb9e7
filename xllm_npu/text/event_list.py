"""Collects the events of one sequence: the output side of output parsers.

Neighbouring texts of one kind become one event. White space between the answer and markup belongs to the markup: it
is held back at the end of reasoning and, where a format is written so (`trims`), of content, and is dropped when
markup follows; white space that nothing follows stays, unless there were calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from xllm_npu.text.output_events import Content, Event, Reasoning, ToolCall


class EventList:
    """`num_tool_calls` is the next call's index."""

    __slots__ = ("_at_line_start", "_content_ends", "_content_starts", "_events", "_has_reasoning", "_held", "_kind",
                 "_parts", "_position", "_skips_newlines", "_skips_space", "_trims", "num_tool_calls")

    def __init__(self, trims: bool, position: Callable[[], int]) -> None:
        """`position`: how many characters of the sequence's text have been read."""
        self.num_tool_calls = 0
        self._position = position
        self._content_starts: list[int] = []  # of stretches of the text, ascending
        self._content_ends: list[int] = []
        self._trims = trims
        self._events: list[Event] = []
        self._parts: list[str] = []  # of the event that is being made
        self._kind: type[Content] | type[Reasoning] = Content
        self._held: list[str] = []  # white space, of the kind that is being made
        self._has_reasoning = False
        self._skips_space = False  # reasoning has begun, with nothing but white space so far
        self._skips_newlines = False  # reasoning has just ended
        self._at_line_start = True

    @property
    def at_line_start(self) -> bool:
        """Whether the line that content has come to has nothing but white space so far."""
        return self._at_line_start

    def is_content(self, offset: int) -> bool | None:
        """Whether the character at `offset` of the text belongs to the answer; None where it has not been read."""
        if offset >= self._position():
            return None
        at = bisect_right(self._content_starts, offset) - 1
        return at >= 0 and offset < self._content_ends[at]

    def content(self, text: str) -> None:
        """The answer's next text, which has just been read."""
        end = self._position()
        if self._content_ends and self._content_ends[-1] >= end - len(text):
            self._content_ends[-1] = end
        else:
            self._content_starts.append(end - len(text))
            self._content_ends.append(end)
        if self._skips_newlines:
            text = text.lstrip("\r\n")
            self._skips_newlines = not text
        if text:
            line = text.rpartition("\n")
            self._at_line_start = (bool(line[1]) or self._at_line_start) and (not line[2] or line[2].isspace())
            self._add(Content, text, self._trims)

    def reasoning(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
            if text and self._has_reasoning:
                text = "\n" + text
        if text:
            self._has_reasoning = True
            self._add(Reasoning, text, True)

    def begin_reasoning(self) -> None:
        """White space before it is dropped; reasoning that there has been before ends in a line break."""
        self._held.clear()
        self._skips_space = True

    def end_reasoning(self) -> None:
        self._held.clear()
        self._skips_space = False
        self._skips_newlines = True

    def call(self, name: str, arguments: str, id: str | None = None) -> None:
        self.drop_space()
        self._close()
        self._events.append(ToolCall(self.num_tool_calls, name, arguments, id))
        self.num_tool_calls += 1
        self._at_line_start = True

    def drop_space(self) -> None:
        """Markup begins here: white space before it is a part of it."""
        if self._trims or self._kind is Reasoning:
            self._held.clear()

    def finish(self) -> None:
        """No more text comes."""
        if self._kind is Reasoning or not self.num_tool_calls:
            self._parts += self._held
        self._held.clear()

    def take(self) -> list[Event]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[Content] | type[Reasoning], text: str, holds: bool) -> None:
        if kind is not self._kind:
            self._held.clear()
            self._close()
            self._kind = kind
        if not holds:
            self._parts.append(text)
            return
        body = text.rstrip()
        if body:
            self._parts += self._held
            self._held.clear()
            self._parts.append(body)
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def _close(self) -> None:
        if self._parts:
            self._events.append(self._kind("".join(self._parts)))
            self._parts.clear()
