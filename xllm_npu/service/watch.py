"""Ends a request's work early: the client left, or the server gives up on it.

`Watch` is entered by the task that serves the request, once its body has been read. While that task waits for
tokens, the watch waits for the connection; what happens first wins. Costs nothing per token.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection; nothing we send will be read."""


class Watch:
    """`async with Watch(receive)`: the block raises `ClientGone`, or what `interrupt` was given, at its await."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._reason: Exception | None = None
        self._task: asyncio.Task[object] | None = None
        self._listener: asyncio.Task[None] | None = None

    def interrupt(self, reason: Exception) -> None:
        """Make the block raise `reason`. The first reason wins."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None,
                        tb: TracebackType | None) -> None:
        task, self._task = self._task, None
        assert task is not None
        assert self._listener is not None
        self._listener.cancel()
        # As asyncio.timeout does: only a cancellation that we asked for becomes our exception.
        if self._reason is not None and task.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise self._reason from None

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())
