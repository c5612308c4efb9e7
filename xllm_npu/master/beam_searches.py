"""The beam searches of a model that go on. Each is one request to its client, and comes to the engines in many.

Runs on the event loop; what becomes text does so elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from xllm_npu.state.messages import AddRequest
from xllm_npu.state.output import RequestOutput

if TYPE_CHECKING:
    from xllm_npu.master.beam_request import BeamRequest
    from xllm_npu.master.output_dispatcher import OutputDispatcher
    from xllm_npu.master.request_factory import RequestFactory

log = logging.getLogger(__name__)

Sink = Callable[[RequestOutput], None]
Send = Callable[[AddRequest, int | None], int]  # to the engine of that rank, or to any; to which it went


class BeamSearches:
    def __init__(self, to_text: Callable[[BeamRequest], Awaitable[RequestOutput]]) -> None:
        """`to_text`: a search that is over, as its client gets it."""
        self._to_text = to_text
        self._searching: set[BeamRequest] = set()
        self._unanswered: set[BeamRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._endings: set[asyncio.Task[None]] = set()  # those that are over become text

    def start(
        self, message: AddRequest, dispatcher: OutputDispatcher, factory: RequestFactory, send: Send, sink: Sink
    ) -> BeamRequest:
        """`sink` gets the one output, unless `abandon` comes first."""
        from xllm_npu.master.beam_request import BeamRequest

        rank: int | None = None

        def send_beam(beam: AddRequest) -> None:
            nonlocal rank
            rank = send(beam, rank)  # where the beams' beginnings are

        def on_end() -> None:
            self._end(search)
            task = asyncio.create_task(self._answer(search, sink))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

        search = BeamRequest(message, factory.eos_token_ids, dispatcher, send_beam, factory.new_id, on_end)
        self._searching.add(search)
        self._unanswered.add(search)
        self._idle.clear()
        search.start()
        return search

    def abandon(self, search: BeamRequest) -> None:
        """Its client has left."""
        self._unanswered.discard(search)
        self._end(search)
        search.close()

    @property
    def searching(self) -> bool:
        return bool(self._searching)

    async def wait_searched(self) -> None:
        """Until none needs the engines any more."""
        await self._idle.wait()

    async def wait_answered(self) -> None:
        """Until those that are over have become text."""
        await asyncio.gather(*self._endings)

    def _end(self, search: BeamRequest) -> None:
        self._searching.discard(search)
        if not self._searching:
            self._idle.set()

    async def _answer(self, search: BeamRequest, sink: Sink) -> None:
        try:
            output = await self._to_text(search)
        except Exception:
            log.exception("a beam search's answer cannot be made")
            output = search.failed()
        if search in self._unanswered:  # else the client left meanwhile
            self._unanswered.remove(search)
            sink(output)
