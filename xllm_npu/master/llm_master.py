"""The composition root of the HTTP process: tokenizer, request factory, output dispatcher, engine client.

`service/` talks to this and to nothing below it. Runs on one asyncio event loop; whatever may block (templates,
tokenizing long prompts) runs on a small thread pool.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xllm_npu.master.request_factory import GenerationInput
    from xllm_npu.state.messages import EngineReady, EngineStats
    from xllm_npu.state.output import RequestOutput
    from xllm_npu.text.tokenizer import Tokenizer


class EngineStatus(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class EngineDeadError(RuntimeError):
    """The engine process is gone; the message names it and how it ended."""


class LLMMaster:
    status: EngineStatus
    failure: str | None  # why status is DEAD
    info: EngineReady | None  # None until READY
    stats: EngineStats  # the latest
    tokenizer: Tokenizer

    def generate(self, request: GenerationInput) -> AsyncIterator[RequestOutput]:
        """Check and submit at once (raises InvalidParameter, EngineDeadError), then iterate outputs.

        The last output has finished=True. Closing the iterator early aborts the request in the engine.
        """
        raise NotImplementedError

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize off the event loop. Raises InvalidParameter('prompt', ...) if it cannot be encoded."""
        raise NotImplementedError

    async def encode_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Apply the model's chat template and tokenize, off the event loop. Raises InvalidParameter."""
        raise NotImplementedError

    async def decode(self, token_ids: list[int]) -> str:
        raise NotImplementedError

    def check_health(self) -> bool:
        raise NotImplementedError
