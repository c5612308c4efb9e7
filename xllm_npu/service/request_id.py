"""X-Request-Id: taken from the client where it is fit for a header and a log line, made here otherwise,
sent back with every response. Requests' ids in bodies are built on it."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_npu.log import REQUEST_ID

HEADER = b"x-request-id"
SCOPE_KEY = "xllm_npu.request_id"
FIT = re.compile(r"[\w.:/+=@-]{1,128}\Z", re.ASCII)


def new_id() -> str:
    return uuid.uuid4().hex


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER), "")
        request_id = given if FIT.match(given) else new_id()
        scope[SCOPE_KEY] = request_id
        REQUEST_ID.set(request_id)  # each request is a task of its own, and so has a context of its own
        header = (HEADER, request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, send_with_id)
