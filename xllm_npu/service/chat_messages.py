"""A conversation as clients send it, checked, in the form that chat templates expect.

Content is text, in one string or in parts; an assistant's earlier tool calls have their arguments as objects, since
that is what templates print. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xllm_npu.service.body import MAX_JSON_DEPTH, depth_exceeds
from xllm_npu.service.errors import quote
from xllm_npu.service.tools import MAX_TOOLS
from xllm_npu.state.sampling_params import InvalidParameter

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
REASONING = ("reasoning", "reasoning_content")

Message = dict[str, Any]


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Raises InvalidParameter with the place of the first fault."""
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: Message) -> Message:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role", "must be a string such as 'user'", role)
    if role == "function" or message.get("function_call"):
        raise InvalidParameter(f"{where}.{'role' if role == 'function' else 'function_call'}",
                               f"{where}: the old function calls are not supported; send tool_calls, and their "
                               "results as messages of role 'tool'.")
    checked = dict(message)
    if isinstance(content, list):
        checked["content"] = [_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise _wrong(f"{where}.content", "must be a string or a list of parts", content)
    for name in (*REASONING, "tool_call_id", "name"):
        if not isinstance(message.get(name), str | None):
            raise _wrong(f"{where}.{name}", "must be a string", message[name])
    calls = checked.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
            raise _wrong(f"{where}.tool_calls", f"must be a list of at most {MAX_TOOLS} calls", calls)
        checked["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if role == "tool":
        checked.setdefault("content", "")
    return checked


def _part(where: str, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _wrong(where, "must be an object with a type", part)
    if kind not in TEXT_PARTS:
        raise InvalidParameter(f"{where}.type", f"Content of type {quote(kind)} is not supported in this version; "
                               "send text.")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text", "must be a string", text)
    return {"type": "text", "text": text}


def _call(where: str, call: Any) -> Message:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise _wrong(where, "must be an object of type 'function'", call)
    if not isinstance(call.get("id"), str | None):
        raise _wrong(f"{where}.id", "must be a string", call["id"])
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise _wrong(f"{where}.function", "must be an object with a name", function)
    arguments = call_arguments(f"{where}.function.arguments", function.get("arguments"))
    return {"type": "function", **({"id": call["id"]} if call.get("id") else {}),
            "function": {"name": name, "arguments": arguments}}


def call_arguments(where: str, arguments: Any) -> dict[str, Any]:
    """The object that a call's arguments are. Raises InvalidParameter if they are none."""
    if isinstance(arguments, str):
        try:
            arguments = _loaded(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise _wrong(where, "must be the JSON text of an object", arguments) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise _wrong(where, "must be the JSON text of an object", arguments)
    if depth_exceeds(arguments, MAX_JSON_DEPTH):
        raise InvalidParameter(where, f"{where} is nested deeper than {MAX_JSON_DEPTH} levels.")
    return arguments


def _loaded(text: str) -> Any:
    """Whatever a model may have written as JSON: a lone surrogate, which is no text, becomes a question mark."""
    value = json.loads(text)
    if "\\ud" in text.lower():
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _wrong(where: str, must: str, value: Any) -> InvalidParameter:
    return InvalidParameter(where, f"{where} {must}, got {quote(value)}.")
