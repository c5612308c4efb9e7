"""From a chat request's messages to its prompt, through the model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xllm_npu.service.chat_messages import checked_messages
from xllm_npu.service.protocol import ChatFields
from xllm_npu.service.tools import Tools
from xllm_npu.state.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from xllm_npu.master.llm_master import LLMMaster
    from xllm_npu.text.chat_prompt import ChatPrompt

THINKING_SWITCHES = ("enable_thinking", "thinking")  # what templates call it


async def encode_messages(master: LLMMaster, body: ChatFields, tools: Tools) -> ChatPrompt:
    """The whole prompt, not truncated."""
    kwargs = template_kwargs(body, tools)
    if body.chat_template:
        if not master.settings.service.trust_request_chat_template:
            raise InvalidParameter("chat_template", "chat_template is refused: this server renders its own alone, "
                                   "unless it is started with --trust-request-chat-template.")
        kwargs["template"] = body.chat_template
    return await master.text.encode_chat(checked_messages(body.messages), **kwargs)


def template_kwargs(body: ChatFields, tools: Tools) -> dict[str, Any]:
    """Arguments of text.chat_template's render, and add_special_tokens for what tokenizes its result."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidParameter("continue_final_message",
                               "continue_final_message and add_generation_prompt exclude each other.")
    opens_turn = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        _set_effort(extra, body.reasoning_effort)
    kwargs: dict[str, Any] = {"add_generation_prompt": opens_turn, "continue_final_message": continues,
                              "documents": body.documents, "kwargs": extra}
    if tools.shown:
        kwargs["tools"] = list(tools.shown)
    if body.add_special_tokens:
        kwargs["add_special_tokens"] = True  # else the template alone decides
    return kwargs


def _set_effort(kwargs: dict[str, Any], effort: str) -> None:
    """Models with levels read the effort itself; those that think or do not have a switch, which the client may set."""
    kwargs.setdefault("reasoning_effort", effort)
    if not any(name in kwargs for name in THINKING_SWITCHES):
        kwargs.update(dict.fromkeys(THINKING_SWITCHES, effort != "none"))


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
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in checked_messages([last])[0]["content"])
