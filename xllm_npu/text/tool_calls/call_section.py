"""Sections that hold any number of calls, each in markers of its own; text between the calls is nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Markers, NotMarkup, Steps
from xllm_npu.text.tagged_output import ToolCallFormat


class CallsInSection(ToolCallFormat):
    """`openers`: what begins a section, and what begins a call, which may stand without a section too."""

    _in_section: Markers

    def __init_subclass__(cls) -> None:
        cls._in_section = Markers((cls.openers[1], cls.section[1]))

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        if opener == self.openers[1]:
            return self._read_call(parse)
        return read_section(parse, self._in_section, self.section[1], self._read_call)

    @abstractmethod
    def _read_call(self, parse: Parse) -> Steps[None]:
        """What follows the call's opener, to the end of the call."""


def read_section(parse: Parse, markers: Markers, end: str, read_call: Callable[[Parse], Steps[None]]) -> Steps[None]:
    """Read up to `end`; every other marker begins a call. Raises NotMarkup for text in which there is no call."""
    between: list[str] = []
    before = parse.events.num_tool_calls
    while True:
        marker = yield from parse.reader.until(markers, between.append)
        if marker == end:
            break
        between.clear()
        yield from read_call(parse)
    if before == parse.events.num_tool_calls and not "".join(between).isspace() and between:
        raise NotMarkup
