"""X-Ignored-Fields: the fields of a request's body that this server does not know, named in the response.

A client's misspelt field would else be noticed by nobody; a log line a request would let clients fill the log.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-ignored-fields"
MAX_NAMES = 20
FIT = re.compile(r"[\w.-]{1,64}\Z", re.ASCII)

_names: ContextVar[list[str] | None] = ContextVar("ignored_fields", default=None)


def note_ignored(names: Collection[str]) -> None:
    """For the response to the request that is being handled; names that are unfit for a header are left out."""
    noted = _names.get()
    if noted is not None:
        noted += sorted(name for name in names if FIT.match(name))[: MAX_NAMES - len(noted)]


class IgnoredFieldsMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        noted: list[str] = []
        _names.set(noted)  # each request is a task of its own, and so has a context of its own

        async def send_with_names(message: Message) -> None:
            if noted and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, ", ".join(noted).encode())]
            await send(message)

        await self._app(scope, receive, send_with_names)
