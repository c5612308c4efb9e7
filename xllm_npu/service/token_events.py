"""A sequence's events beside the log probabilities of the tokens that its answer was written in.

A token belongs to the answer if its text begins there; those of markup and reasoning belong to nothing. The text is
parsed token by token, so that the result is the same however many tokens come at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from xllm_npu.service.chat_turn import SequenceEvents
from xllm_npu.state.output import PositionLogprobs, SequenceDelta
from xllm_npu.text.output_events import Content, Event

TokenEvent = tuple[Event, list[PositionLogprobs]]  # of a Content its tokens; else none


class TokenEvents:
    def __init__(self, sequence: SequenceEvents) -> None:
        self._sequence = sequence
        self._num_chars = 0  # of the text so far
        self._open: deque[PositionLogprobs] = deque()  # tokens of which nobody knows yet what they belong to
        self._ready: list[PositionLogprobs] = []  # of the answer's text that is held back

    def push(self, delta: SequenceDelta) -> list[TokenEvent]:
        """As `SequenceEvents.push`."""
        found: list[TokenEvent] = []
        for part in self._parts(delta):
            events = self._sequence.push(part)
            self._sort_out(at_end=part.finish_reason is not None)
            for event in events:
                found.append((event, self._ready if isinstance(event, Content) else []))
                self._ready = []  # of what something else follows, without a text, were blanks
        return found

    def _parts(self, delta: SequenceDelta) -> Iterator[SequenceDelta]:
        """The delta cut where tokens begin, the end last."""
        done = 0
        for position in delta.logprobs or ():
            at = min(max(position.text_offset - self._num_chars, done), len(delta.text))
            if at > done:
                yield SequenceDelta(delta.index, delta.text[done:at])
            done = at
            self._open.append(position)
        self._num_chars += len(delta.text)
        yield SequenceDelta(delta.index, delta.text[done:], finish_reason=delta.finish_reason,
                            stop_reason=delta.stop_reason)

    def _sort_out(self, at_end: bool) -> None:
        while self._open:
            is_content = self._sequence.is_content(self._open[0].text_offset)
            if is_content is None and not at_end:
                return
            position = self._open.popleft()
            if is_content:
                self._ready.append(position)
