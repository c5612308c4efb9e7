"""A turn's answer as OpenAI's Responses API tells it: output items one after the other, and a stream's events.

`ResponseOutput` takes the events of the one choice and gives, for each, the stream's events in the official order; a
reply that is sent whole takes its items at the end. The events get their `sequence_number` when they are framed. Knows
no HTTP and no request.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from xllm_npu.service.replies import ChatLogprob
from xllm_npu.text.output_events import Content, Event, ToolCall

StreamEvent = dict[str, Any]

_encode = msgspec.json.Encoder().encode


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class EventFrames:
    """Frames of one stream, numbered."""

    def __init__(self) -> None:
        self._number = 0

    def frame(self, event: StreamEvent) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return b"event: " + event["type"].encode() + b"\ndata: " + _encode(numbered) + b"\n\n"


# Kind of a text item -> type of its part, and the names of its events.
_TEXT = {"message": ("output_text", "response.output_text"), "reasoning": ("reasoning_text", "response.reasoning_text")}


class ResponseOutput:
    """The items as they grow; the last one is in progress until another begins or the end comes."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._parts: list[str] | None = None  # text of the last item, while it is open
        self._logprobs: list[ChatLogprob] = []  # of that text's tokens

    def push(self, event: Event, logprobs: Sequence[ChatLogprob] = ()) -> list[StreamEvent]:
        """`logprobs`: of the answer's tokens in this event."""
        if isinstance(event, ToolCall):
            return self.close() + self._call(event)
        kind = "message" if isinstance(event, Content) else "reasoning"
        events = [] if self._is_open(kind) else self.close() + self._begin(kind)
        assert self._parts is not None
        self._parts.append(event.text)
        self._logprobs += logprobs
        return [*events, self._of_part(f"{_TEXT[kind][1]}.delta", delta=event.text, **_logprobs_of(kind, logprobs))]

    def close(self, status: str = "completed") -> list[StreamEvent]:
        """The end of the open item, if there is one."""
        if self._parts is None:
            return []
        item, text, logprobs = self.items[-1], "".join(self._parts), self._logprobs
        self._parts, self._logprobs = None, []
        kind = item["type"]
        part = _part(kind, text, logprobs)
        item["content"] = [part]
        item["status"] = status
        return [self._of_part(f"{_TEXT[kind][1]}.done", text=text, **_logprobs_of(kind, logprobs)),
                self._of_part("response.content_part.done", part=part),
                self._of_item("response.output_item.done")]

    def _is_open(self, kind: str) -> bool:
        return self._parts is not None and self.items[-1]["type"] == kind

    def _begin(self, kind: str) -> list[StreamEvent]:
        if kind == "message":
            item = {"id": new_id("msg"), "type": kind, "role": "assistant", "status": "in_progress", "content": []}
        else:
            item = {"id": new_id("rs"), "type": kind, "summary": [], "status": "in_progress", "content": []}
        self.items.append(item)
        self._parts = []
        return [self._of_item("response.output_item.added"),
                self._of_part("response.content_part.added", part=_part(kind, ""))]

    def _call(self, call: ToolCall) -> list[StreamEvent]:
        item = {"id": new_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name, "arguments": "",
                "status": "in_progress"}
        self.items.append(item)
        index = {"item_id": item["id"], "output_index": len(self.items) - 1}
        added = self._of_item("response.output_item.added")
        item |= {"arguments": call.arguments, "status": "completed"}
        return [added,
                {"type": "response.function_call_arguments.delta", **index, "delta": call.arguments},
                {"type": "response.function_call_arguments.done", **index, "name": call.name,
                 "arguments": call.arguments},
                self._of_item("response.output_item.done")]

    def _of_item(self, type: str) -> StreamEvent:
        return {"type": type, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _of_part(self, type: str, **fields: Any) -> StreamEvent:
        return {"type": type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1,
                "content_index": 0, **fields}


def _part(kind: str, text: str, logprobs: Sequence[ChatLogprob] = ()) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _TEXT[kind][0], "text": text}
    if kind == "message":
        part["annotations"] = []
    return part | _logprobs_of(kind, logprobs)


def _logprobs_of(kind: str, logprobs: Sequence[ChatLogprob]) -> dict[str, Any]:
    return {"logprobs": logprobs} if kind == "message" else {}


def output_messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the items are in a conversation that goes on."""
    message: dict[str, Any] = {"role": "assistant"}
    for item in items:
        if item["type"] == "function_call":
            message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": {
                "name": item["name"], "arguments": item["arguments"]}})
            continue
        name = "content" if item["type"] == "message" else "reasoning"
        message[name] = message.get(name, "") + "".join(part["text"] for part in item["content"])
    return [message] if len(message) > 1 else []
