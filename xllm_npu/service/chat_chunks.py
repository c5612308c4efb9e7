"""Events as the deltas of chat.completion.chunk: a call's name comes first, then its arguments, as clients expect."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from xllm_npu.service.replies import Delta, Function, ToolCallDelta
from xllm_npu.text.output_events import Content, Event, Reasoning


def event_deltas(events: Iterable[Event]) -> list[Delta]:
    deltas: list[Delta] = []
    for event in events:
        if isinstance(event, Content):
            deltas.append(Delta(content=event.text))
        elif isinstance(event, Reasoning):
            deltas.append(Delta(reasoning=event.text, reasoning_content=event.text))
        else:
            head = ToolCallDelta(event.index, Function(event.name, ""), event.id or "", "function")
            rest = ToolCallDelta(event.index, Function(UNSET, event.arguments))
            deltas += [Delta(tool_calls=[head]), Delta(tool_calls=[rest])]
    return deltas
