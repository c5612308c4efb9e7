"""Anthropic's Messages requests, checked and brought into the form of /v1/chat/completions.

Faults are named as the Messages API spells them. Blocks that are not text are refused by name; `cache_control` and
`signature` mean nothing here and are dropped.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from xllm_npu.service.errors import quote
from xllm_npu.service.protocol import Body, ChatBody, Int32, Strings
from xllm_npu.service.structured import JsonSchemaBody, ResponseFormatBody
from xllm_npu.state.sampling_params import InvalidParameter

MIN_THINKING_BUDGET = 1024
CALLER_NOTE = "x-anthropic-billing-header"  # a system block for billing, other at each request: it would spoil caching
# What the chat form calls these, in errors that it raises.
RENAMED = {".function.parameters": ".input_schema", ".function.": ".", "response_format.json_schema":
           "output_config.format", "thinking_token_budget": "thinking.budget_tokens",
           "reasoning_effort": "output_config.effort", "stop": "stop_sequences"}


class CountTokensBody(Body):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: Any = None  # a string or text blocks
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    max_tokens: Int32
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None


def chat_body(body: CountTokensBody) -> ChatBody:
    """The same request in chat's form. Raises InvalidParameter."""
    fields: dict[str, Any] = {"messages": _system(body.system) + _conversation(body.messages)}
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream, "stop": body.stop_sequences,
                   "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    if body.messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    fields["tools"] = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    fields["tool_choice"], fields["parallel_tool_calls"] = _tool_choice(body.tool_choice or {"type": "auto"})
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        fields["include_reasoning"] = _thinks(body.thinking, getattr(body, "max_tokens", None))
        if body.thinking["type"] == "enabled":
            fields["thinking_token_budget"] = body.thinking["budget_tokens"]
        kwargs = {"enable_thinking": fields["include_reasoning"], "thinking": fields["include_reasoning"], **kwargs}
    fields["chat_template_kwargs"] = kwargs
    fields |= _output_config(body.output_config or {})
    return ChatBody.model_construct(model=body.model, **fields)


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    text = "\n".join(part for part in _texts("system", system) if not part.startswith(CALLER_NOTE))
    return [{"role": "system", "content": text}] if text else []


def _texts(where: str, content: Any) -> list[str]:
    """A string, or blocks that are all text."""
    if isinstance(content, str):
        return [content]
    return [_text(f"{where}[{i}]", block) for i, block in enumerate(_blocks(where, content))]


def _blocks(where: str, content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise InvalidParameter(where, f"{where} must be a string or a list of blocks, got {quote(content)}.")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidParameter(f"{where}[{i}]", f"{where}[{i}] must be an object with a type, got {quote(block)}.")
    return content


def _text(where: str, block: dict[str, Any]) -> str:
    if block["type"] != "text":
        raise InvalidParameter(f"{where}.type", f"{where}.type: a block of type {quote(block['type'])} is not "
                               "supported here in this version.")
    return _string(where, block, "text")


def _string(where: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{where}.{name}", f"{where}.{name} must be a string, got {quote(value)}.")
    return value


def _conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise InvalidParameter(f"{where}.role", f"{where}.role must be 'user' or 'assistant', got {quote(role)}.")
        where += ".content"
        if isinstance(content, str):
            result.append({"role": role, "content": content})
        elif role == "assistant":
            result.append(_assistant(where, _blocks(where, content)))
        elif role == "user":
            result += _user(where, _blocks(where, content))
        else:
            result.append({"role": role, "content": "\n".join(_texts(where, content))})
    return result


def _user(where: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, in the order of the blocks."""
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "tool_result":
            output = "\n".join(_texts(f"{place}.content", block.get("content") or ""))
            messages.append({"role": "tool", "tool_call_id": _string(place, block, "tool_use_id"), "content": output})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append({"type": "text", "text": _text(place, block)})
        else:
            messages.append({"role": "user", "content": [{"type": "text", "text": _text(place, block)}]})
    return messages or [{"role": "user", "content": ""}]


def _assistant(where: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    text: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block["type"] == "thinking":
            thinking.append(_string(place, block, "thinking"))
        elif block["type"] == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise InvalidParameter(f"{place}.input", f"{place}.input must be an object, got {quote(arguments)}.")
            calls.append({"id": _string(place, block, "id"), "type": "function", "function": {
                "name": _string(place, block, "name"), "arguments": arguments}})
        elif block["type"] != "redacted_thinking":
            text.append(_text(place, block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        message["reasoning"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidParameter(where, f"{where} must be an object, got {quote(tool)}.")
    if tool.get("type") not in (None, "custom"):
        raise InvalidParameter(f"{where}.type", f"{where}.type: this server runs no tools of its own such as "
                               f"{quote(tool['type'])}; it takes tools of type 'custom'.")
    return {"type": "function", "function": {
        "name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema"),
        "strict": tool.get("strict")}}


def _tool_choice(choice: dict[str, Any]) -> tuple[Any, bool]:
    kinds: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none",
                             "tool": {"type": "function", "function": {"name": choice.get("name")}}}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidParameter("tool_choice.type", f"tool_choice.type must be 'auto', 'any', 'tool' or 'none', "
                               f"got {quote(kind)}.")
    return kinds[kind], choice.get("disable_parallel_tool_use") is not True


def _thinks(thinking: dict[str, Any], max_tokens: int | None) -> bool:
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidParameter("thinking.type", "thinking.type must be 'enabled', 'disabled' or 'adaptive', "
                               f"got {quote(kind)}.")
    budget = thinking.get("budget_tokens")
    if kind == "enabled":
        if type(budget) is not int or budget < MIN_THINKING_BUDGET:
            raise InvalidParameter("thinking.budget_tokens", "thinking.budget_tokens must be at least "
                                   f"{MIN_THINKING_BUDGET}, got {quote(budget)}.")
        if max_tokens is not None and budget >= max_tokens:
            raise InvalidParameter("thinking.budget_tokens", "thinking.budget_tokens must be less than max_tokens="
                                   f"{max_tokens}, got {budget}.")
    return kind != "disabled"


def _output_config(config: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    effort, format = config.get("effort"), config.get("format")
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidParameter("output_config.effort", f"output_config.effort must be a string, got "
                                   f"{quote(effort)}.")
        fields["reasoning_effort"] = effort
    if format is not None:
        if not isinstance(format, dict) or format.get("type") != "json_schema":
            raise InvalidParameter("output_config.format", "output_config.format must be an object of type "
                                   f"'json_schema', got {quote(format)}.")
        fields["response_format"] = ResponseFormatBody(
            type="json_schema", json_schema=JsonSchemaBody(name="output", schema=format.get("schema")))
    return fields
