"""OpenAI's Responses requests, checked and brought into the form of /v1/chat/completions.

Items of the input become messages: a reasoning item and the calls that follow it belong to the assistant's message they
stand beside. Faults are named as this API spells them. Tools that a server runs itself are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from xllm_npu.service.chat_messages import call_arguments
from xllm_npu.service.errors import quote
from xllm_npu.service.protocol import Body, ChatBody, Int32, Int64, Strings, validated
from xllm_npu.service.structured import ResponseFormatBody
from xllm_npu.state.sampling_params import MAX_LOGPROBS, InvalidParameter

MAX_ITEMS = 4096
MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"  # of `include`
Message = dict[str, Any]

# What the chat form calls these, in errors that it raises.
RENAMED = {"max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens", ".function.": ".",
           "response_format.json_schema": "text.format", "response_format": "text.format",
           "reasoning_effort": "reasoning.effort", "messages": "input"}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "stop", "ignore_eos", "min_tokens", "priority", "cache_salt", "parallel_tool_calls",
            "chat_template_kwargs", "stream")


class ResponsesBody(Body):
    input: Any  # a string or items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: Int32 | None = None
    max_tool_calls: Int32 | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    include: list[str] | None = None
    top_logprobs: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Strings | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def refuse_unavailable(body: ResponsesBody, extra: dict[str, Any]) -> None:
    """What this server knows and cannot do. `extra`: the whole request, with fields that `ResponsesBody` lacks."""
    hints = {"background": (body.background, "Send the request without it, or stream it."),
             "prompt": (extra.get("prompt"), "Send the prompt's text as instructions and input."),
             "conversation": (extra.get("conversation"), "Send the conversation as input.")}
    for name, (given, hint) in hints.items():
        if given:
            raise InvalidParameter(name, f"{name} is not supported in this version. {hint}")


def chat_body(body: ResponsesBody, earlier: Sequence[Message]) -> ChatBody:
    """The same request in chat's form; `earlier` are the messages of the responses that it continues."""
    messages = [*earlier, *input_messages(body.input)]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    fields: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING}
    fields["max_completion_tokens"] = body.max_output_tokens
    fields |= _logprobs(body)
    fields["tools"] = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise InvalidParameter("reasoning.effort", f"reasoning.effort must be a string, got {quote(effort)}.")
    fields["reasoning_effort"] = effort
    fields["response_format"] = _format((body.text or {}).get("format"))
    return ChatBody.model_construct(model=body.model, messages=messages, **fields)


def _logprobs(body: ResponsesBody) -> dict[str, Any]:
    """They are asked for by `include`; without that `top_logprobs` has no effect."""
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidParameter("top_logprobs", f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}.")
    wanted = LOGPROBS in (body.include or ())
    return {"logprobs": wanted, "top_logprobs": top if wanted else None}


def input_items(given: Any) -> list[Any]:
    """`input` as the list that it stands for."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given)


def input_messages(given: Any) -> list[Message]:
    """The messages that `input` stands for. Raises InvalidParameter."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_ITEMS:
        raise InvalidParameter("input", f"input must be a string or a list of 1 to {MAX_ITEMS} items, "
                               f"got {quote(given)}.")
    conversation = _Conversation()
    for i, item in enumerate(given):
        conversation.add(f"input[{i}]", item)
    return conversation.messages


class _Conversation:
    """Items, one by one, to messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._assistant: Message | None = None  # the last message, where what comes next may belong to it

    def add(self, where: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise InvalidParameter(where, f"{where} must be an object, got {quote(item)}.")
        kind = item.get("type", "message")
        if kind == "message":
            self._message(where, item)
        elif kind == "function_call":
            self._of_assistant().setdefault("tool_calls", []).append({
                "id": _string(where, item, "call_id"), "type": "function", "function": {
                    "name": _string(where, item, "name"),
                    "arguments": call_arguments(f"{where}.arguments", item.get("arguments"))}})
        elif kind == "function_call_output":
            self._assistant = None
            self.messages.append({"role": "tool", "tool_call_id": _string(where, item, "call_id"),
                                  "content": _content(f"{where}.output", item.get("output"))})
        elif kind == "reasoning":
            self._reasoning(where, item)
        else:
            raise InvalidParameter(f"{where}.type", f"{where}.type: an item of type {quote(kind)} is not supported in "
                                   "this version.")

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role, content = item.get("role"), _content(f"{where}.content", item.get("content"))
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidParameter(f"{where}.role", f"{where}.role must be 'user', 'assistant', 'system' or "
                                   f"'developer', got {quote(role)}.")
        if role != "assistant":
            self._assistant = None
            self.messages.append({"role": role, "content": content})
        elif self._assistant is not None and not self._assistant.keys() & {"content", "tool_calls"}:
            self._assistant["content"] = content  # its reasoning came before
        else:
            self._assistant = {"role": role, "content": content}
            self.messages.append(self._assistant)

    def _of_assistant(self) -> Message:
        if self._assistant is None:
            self._assistant = {"role": "assistant"}
            self.messages.append(self._assistant)
        return self._assistant

    def _reasoning(self, where: str, item: dict[str, Any]) -> None:
        """Its text, or its summary where there is no text; what is encrypted elsewhere says nothing here."""
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(
                isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise InvalidParameter(f"{where}.content", f"{where}.content must be a list of parts with text.")
        if parts:
            self._assistant = {"role": "assistant", "reasoning": "".join(part["text"] for part in parts)}
            self.messages.append(self._assistant)


def _content(where: str, content: Any) -> Any:
    """Text, or parts that chat's own check knows, under the names that they have here."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(where, f"{where} must be a string or a list of parts, got {quote(content)}.")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise InvalidParameter(f"{where}[{i}].type", f"{where}[{i}].type: content of type {quote(kind)} is not "
                                   "supported in this version; send text.")
        _string(f"{where}[{i}]", part, "refusal" if kind == "refusal" else "text")
    return content


def _string(where: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{where}.{name}", f"{where}.{name} must be a string, got {quote(value)}.")
    return value


def _tool(where: str, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidParameter(f"{where}.type", f"{where}.type must be 'function', got {quote(kind)}: this server runs "
                               "no tools of its own.")
    return {"type": "function", "function": {name: tool.get(name)
                                             for name in ("name", "description", "parameters", "strict")}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        inner = [_tool_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": inner}}
    return choice


def _format(format: Any) -> ResponseFormatBody | None:
    """text.format to response_format: the schema's fields are one level deeper there."""
    if format is None:
        return None
    if not isinstance(format, dict) or not isinstance(format.get("type"), str):
        raise InvalidParameter("text.format", f"text.format must be an object with a type, got {quote(format)}.")
    if format["type"] == "json_schema":
        inner = {name: format[name] for name in ("name", "description", "schema", "strict") if name in format}
        format = {"type": "json_schema", "json_schema": inner}
    return validated(ResponseFormatBody, format, "text.format")
