"""What the HTTP process knows of a model's text: its tokenizer, its chat template, and the markup that it writes.

Whatever may block (templates, tokenizing, loading the tokenizer) runs on a few threads, off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.settings import Settings
from xllm_npu.state.messages import EngineReady
from xllm_npu.text.chat_prompt import ChatPrompt, encode_chat
from xllm_npu.text.pooling_prompt import encode_inputs, encode_pairs
from xllm_npu.text.template_process import TemplateProcesses

if TYPE_CHECKING:
    from xllm_npu.text.chat_template import ChatTemplate
    from xllm_npu.text.output_format import OutputFormat
    from xllm_npu.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TEXT_THREADS = 4

T = TypeVar("T")


class ModelText:
    """For one event loop. Nothing but `run` may be asked before `load` has returned."""

    tokenizer: Tokenizer
    output_format: OutputFormat  # how the model writes calls and reasoning
    template: ChatTemplate
    _ready: EngineReady

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self._client_templates = TemplateProcesses()

    def begin_import(self) -> None:
        """What `load` needs and is slow to import, meanwhile."""
        self._pool.submit(_import)

    async def load(self, settings: Settings, ready: EngineReady) -> None:
        """Of the model that an engine has loaded. Raises what is wrong with its files. Takes seconds."""
        self.tokenizer, self.template, self.output_format = await self.run(load_text, settings, ready)
        self._ready = ready

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidParameter('prompt', ...) if it cannot be encoded."""
        return await self.run(self.tokenizer.encode, text, add_special_tokens)

    async def encode_inputs(self, texts: Sequence[str | list[int]], limit: int, add_special_tokens: bool = True,
                            side: str = "right") -> list[list[int]]:
        """Several at once; `limit`: tokens to keep of each, special ones included; 0: all. Raises InvalidParameter."""
        return await self.run(encode_inputs, self.tokenizer, texts, limit, add_special_tokens, side)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], limit: int, instruction: str = ""
    ) -> list[list[int]]:
        """(query, document) as the model takes both together; `limit` as above. Raises InvalidParameter."""
        pooling = self._ready.pooling
        assert pooling is not None
        return await self.run(encode_pairs, self.tokenizer, pairs, limit, pooling.pairs, self._ready.vocab_size,
                              pooling.num_types, instruction)

    async def encode_chat(
        self, messages: list[dict[str, Any]], add_special_tokens: bool = False, **template_kwargs: Any
    ) -> ChatPrompt:
        """By the model's chat template. Raises InvalidParameter.

        `template_kwargs` are those of `ChatTemplate.render`; a `template` among them is the client's.
        """
        template = template_kwargs.pop("template", None)
        if template is not None:
            text = await self._client_templates.render(
                template, self.tokenizer.special_tokens, messages, **template_kwargs)
            return ChatPrompt(text, await self.encode(text, add_special_tokens))
        return await self.run(
            partial(encode_chat, self.template, self.tokenizer, messages, add_special_tokens, **template_kwargs))

    async def decode(self, token_ids: list[int]) -> str:
        return await self.run(self.tokenizer.decode, token_ids, False)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """On one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def check_parsers(settings: Settings) -> None:
    """Raises SettingsError for the name of a parser that there is not."""
    from xllm_npu.text.output_format import ModelHints, output_format

    try:
        output_format(settings.service.tool_call_parser, settings.service.reasoning_parser, ModelHints())
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _import() -> None:
    with contextlib.suppress(ImportError):  # reported when it is used
        import xllm_npu.text.tokenizer  # noqa: F401


def load_text(settings: Settings, ready: EngineReady) -> tuple[Tokenizer, ChatTemplate, OutputFormat]:
    """Of the model that an engine has loaded. Raises what is wrong with its files. Takes seconds."""
    from xllm_npu.text.chat_template import ChatTemplate
    from xllm_npu.text.output_format import ModelHints, output_format
    from xllm_npu.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(Path(settings.model.tokenizer or ready.tokenizer_dir))
    tokenizer.encode("The first call builds tables that no request should wait for.")
    template = ChatTemplate.of(tokenizer, settings.model.chat_template)
    hints = ModelHints(ready.architecture, template.text, tokenizer.marker_ids, frozenset(tokenizer.added_tokens))
    chosen = output_format(settings.service.tool_call_parser, settings.service.reasoning_parser, hints)
    log.info("tool calls: %s; reasoning: %s", chosen.name_of_tools or "none", chosen.name_of_reasoning or "none")
    return tokenizer, template, chosen
