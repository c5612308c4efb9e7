"""A turn's answer as Anthropic's Messages API tells it: content blocks one after the other, and a stream's events.

`MessageBlocks` takes the events of the one choice and gives, for each, the stream's events; a reply that is sent whole
takes its blocks at the end. Knows no HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from xllm_npu.service.generation import UsageCount
from xllm_npu.text.output_events import Content, Event, Reasoning

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_encode = msgspec.json.Encoder().encode


def frame(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + _encode(event) + b"\n\n"


class MessageBlocks:
    """The content of one message as it grows; its last block is open until another begins or the end comes."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = ""  # type of the last block, while it is open

    def push(self, event: Event) -> list[dict[str, Any]]:
        """The stream's events that say the same."""
        if isinstance(event, Content):
            return self._text("text", "text", {"type": "text", "text": ""}, "text_delta", event.text)
        if isinstance(event, Reasoning):
            return self._text("thinking", "thinking", {"type": "thinking", "thinking": "", "signature": ""},
                              "thinking_delta", event.text)
        block: dict[str, Any] = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        events = [*self.close(), *self._begin(block)]
        events.append(self._delta({"type": "input_json_delta", "partial_json": event.arguments}))
        block["input"] = msgspec.Raw(event.arguments.encode())  # as the model wrote it: numbers of any size, escapes
        return events + self.close()

    def _text(self, kind: str, key: str, block: dict[str, Any], delta: str, text: str) -> list[dict[str, Any]]:
        events = [] if self._open == kind else [*self.close(), *self._begin(block)]
        self.blocks[-1][key] += text
        return [*events, self._delta({"type": delta, key: text})]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self.blocks.append(block)
        self._open = block["type"]
        return [{"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def close(self) -> list[dict[str, Any]]:
        """The end of the open block, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        events: list[dict[str, Any]] = []
        if kind == "thinking":  # clients wait for the signature; there is nothing here to sign
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]


def usage(count: UsageCount) -> dict[str, int]:
    """Tokens read from the prefix cache are counted apart from the input."""
    known = count.usage()
    cached = known.prompt_tokens_details.cached_tokens
    return {"input_tokens": known.prompt_tokens - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": known.completion_tokens}


def ending(finish_reason: str | None, stop_reason: int | str | None) -> dict[str, str | None]:
    """The two fields that say why the message ended."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": STOP_REASONS.get(finish_reason or "", "end_turn"), "stop_sequence": None}


def message(id: str, model: str, content: list[dict[str, Any]], end: dict[str, str | None],
            used: dict[str, int]) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "model": model, "content": content, **end,
            "usage": used}
