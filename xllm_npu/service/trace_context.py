"""The W3C trace context of a request, where the spans of its generations find it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from xllm_npu.tracing import INCOMING, TRACE_HEADERS

MAX_BYTES = 1024  # of one header; the standard asks for 512 of tracestate to be kept
NAMES = {name.encode(): name for name in TRACE_HEADERS}


class TraceContextMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            INCOMING.set({NAMES[name]: value.decode("latin-1") for name, value in scope["headers"]
                          if name in NAMES and len(value) <= MAX_BYTES})
        await self._app(scope, receive, send)
