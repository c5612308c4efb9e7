"""From a chat request's messages to prompt tokens, through the model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xllm_npu.service.errors import quote
from xllm_npu.service.protocol import ChatFields
from xllm_npu.state.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from xllm_npu.master.llm_master import LLMMaster

TEXT_PARTS = ("text", "input_text", "refusal")


async def encode_messages(master: LLMMaster, body: ChatFields) -> list[int]:
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(body.messages)]
    return await master.encode_chat(messages, **template_kwargs(body))


async def prompt_text(master: LLMMaster, body: ChatFields) -> str:
    """What the messages became, before it was tokenized and truncated."""
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(body.messages)]
    kwargs = template_kwargs(body)
    kwargs.pop("add_special_tokens", None)
    return await master.render_chat(messages, **kwargs)


def template_kwargs(body: ChatFields) -> dict[str, Any]:
    """Arguments of text.chat_template's render, and add_special_tokens for what tokenizes its result."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidParameter("continue_final_message",
                               "continue_final_message and add_generation_prompt exclude each other.")
    opens_turn = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    kwargs: dict[str, Any] = {"add_generation_prompt": opens_turn, "continue_final_message": continues,
                              "documents": body.documents, "kwargs": extra}
    if body.add_special_tokens:
        kwargs["add_special_tokens"] = True  # else the template alone decides
    return kwargs


def response_role(body: ChatFields) -> str:
    """The template opened the assistant's turn, or the last message's goes on."""
    if body.continue_final_message or body.add_generation_prompt is False:
        return str(body.messages[-1]["role"])
    return "assistant"


def echoed_text(body: ChatFields) -> str:
    """What `echo` puts before the reply: the last message, if it is of the same role."""
    last = body.messages[-1]
    content = last.get("content")
    if last["role"] != response_role(body) or content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidParameter(f"{where}.role", f"{where}.role must be a string such as 'user', got {quote(role)}.")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise InvalidParameter(f"{where}.content",
                               f"{where}.content must be a string or a list of parts, got {quote(content)}.")
    return {**message, "content": [_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]}


def _part(where: str, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidParameter(where, f"{where} must be an object with a type, got {quote(part)}.")
    if kind not in TEXT_PARTS:
        raise InvalidParameter(f"{where}.type", f"Content of type {quote(kind)} is not supported in this version; "
                               "send text.")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidParameter(f"{where}.text", f"{where}.text must be a string, got {quote(text)}.")
    return {"type": "text", "text": text}
