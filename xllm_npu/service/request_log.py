"""One line in the log for each request: method, path, status, time. Never a query, a header or a text."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_npu.service.errors import quote
from xllm_npu.service.request_id import SCOPE_KEY

logger = logging.getLogger("xllm_npu.service.request")


class RequestLogMiddleware:
    """The time is that until the last byte of the response was handed over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            logger.info("%s %s %d %.1f ms %s", scope["method"], quote(scope["path"])[1:-1], status,
                        (time.monotonic() - began) * 1e3, scope[SCOPE_KEY])
