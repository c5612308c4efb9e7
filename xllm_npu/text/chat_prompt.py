"""A conversation as the model reads it: rendered by its chat template, then tokenized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xllm_npu.text.chat_template import ChatTemplate
    from xllm_npu.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class ChatPrompt:
    text: str  # its tail tells what the model is in the midst of: a parser of the answer needs it
    token_ids: list[int]


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, Any]], add_special_tokens: bool,
    **template_kwargs: Any,
) -> ChatPrompt:
    """`template_kwargs` are those of `ChatTemplate.render`. Raises InvalidParameter."""
    text = template.render(messages, **template_kwargs)
    return ChatPrompt(text, tokenizer.encode(text, add_special_tokens))
