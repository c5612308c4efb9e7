"""Calls as JSON without any markup, as models write them whose template knows no tools.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

One object, several in a row (with `;` or `,` between them or nothing), a list of them, all that also in a code fence;
always at the beginning of a line. As nothing else says that it is a call, the name must be one of the tools that are
offered and the object must have no other keys than calls have. As soon as one of these fails, the text is content.
"""

from __future__ import annotations

import re

from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import NotMarkup, Steps
from xllm_npu.text.tool_calls.call_object import read_call_object

FENCE = "```"
OPENERS = ("{", "[", FENCE)

_LANGUAGE = re.compile(r"[A-Za-z_]*")
MAX_LANGUAGE = 16


def read_bare(parse: Parse, opener: str) -> Steps[None]:
    """Read the calls that one of OPENERS begins."""
    parse.is_certain = False
    reader = parse.reader
    if opener != FENCE:
        yield from _read_calls(parse, opener)
        return
    yield from reader.matching(_LANGUAGE, MAX_LANGUAGE)
    yield from reader.space()
    first = yield from reader.expect("{", "[")
    yield from _read_calls(parse, first)
    yield from reader.space()
    yield from reader.expect(FENCE)


def _read_calls(parse: Parse, first: str) -> Steps[None]:
    reader = parse.reader
    in_list = first == "["
    if in_list:
        yield from reader.space()
        first = yield from reader.expect("{")
    while True:
        yield from read_one(parse, first)
        yield from reader.space()
        if in_list:
            if (yield from reader.expect(",", "]")) == "]":
                return
            yield from reader.space()
            yield from reader.expect("{")
        else:
            mark = yield from reader.accept(";", ",")
            yield from reader.space()
            if (yield from reader.accept("{")) is None:
                if mark is not None:
                    raise NotMarkup
                return
        first = "{"
        parse.is_certain = False


def read_one(parse: Parse, first: str = "") -> Steps[None]:
    """Read one object, which is a call of a tool that is offered."""

    def accepts(name: str) -> bool:
        parse.is_certain = name in parse.tools
        return parse.is_certain

    call = yield from read_call_object(parse.reader, accepts, first)
    parse.call(*call)
