"""One request's outputs on their way to a reader that may be slow.

News that nobody has taken yet are merged into one output, so that what waits is bounded by what the request may
generate, not by how many steps have passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from xllm_npu.state.output import RequestOutput, SequenceDelta


class RequestStream:
    """An async iterator of outputs; the last one has `finished`. `aclose` before that aborts the request."""

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close
        self._pending: RequestOutput | None = None
        self._wake: asyncio.Future[None] | None = None
        self._done = False

    def put(self, output: RequestOutput) -> None:
        self._pending = output if self._pending is None else merge(self._pending, output)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        while self._pending is None:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        output, self._pending = self._pending, None
        self._done = output.finished
        return output

    async def aclose(self) -> None:
        if not self._done:
            self._done = True
            self._close()


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Both outputs' news as one, `second` being later."""
    by_index = {delta.index: delta for delta in first.deltas}
    for delta in second.deltas:
        earlier = by_index.get(delta.index)
        if earlier is None:
            by_index[delta.index] = delta
            continue
        logprobs = earlier.logprobs
        if delta.logprobs is not None:
            logprobs = (logprobs or []) + delta.logprobs
        by_index[delta.index] = SequenceDelta(
            delta.index, earlier.text + delta.text, earlier.token_ids + delta.token_ids, logprobs,
            delta.finish_reason or earlier.finish_reason,
            delta.stop_reason if delta.finish_reason else earlier.stop_reason,
        )
    second.deltas = list(by_index.values())
    second.prompt_logprobs = second.prompt_logprobs or first.prompt_logprobs
    second.error = second.error or first.error
    return second
