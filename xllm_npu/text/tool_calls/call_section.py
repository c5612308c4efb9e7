"""Sections that hold any number of calls, each in markers of its own; text between the calls is nothing."""

from __future__ import annotations

from collections.abc import Callable

from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Markers, NotMarkup, Steps


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
