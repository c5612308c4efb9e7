"""Failures of /v1/messages as Anthropic's clients know them, wherever on the way they arise.

Routes and middlewares raise and answer `ApiError`s in OpenAI's envelope; the middleware here rewrites those bodies on
Anthropic's routes and repeats the request's id under the header that these clients read.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_npu.service.errors import ApiError, ErrorEnvelope
from xllm_npu.service.request_id import SCOPE_KEY

ROUTES = "/v1/messages"
TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class MessagesError(msgspec.Struct):
    type: str
    message: str


class MessagesErrorEnvelope(msgspec.Struct):
    error: MessagesError
    type: str = "error"
    request_id: str | UnsetType = UNSET


def is_messages_route(scope: Scope) -> bool:
    path = get_route_path(scope)
    return path == ROUTES or path.startswith(ROUTES + "/")


def error_type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream."""
    body = MessagesErrorEnvelope(MessagesError(error_type(error.status), error.message))
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


class MessagesErrorMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_messages_route(scope):
            await self._app(scope, receive, send)
            return
        id = scope[SCOPE_KEY]
        failed: Message | None = None  # the start of an error response, held until its body is known

        async def rewriting_send(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers["request-id"] = id
                message = {**message, "headers": headers.raw}
                if message["status"] >= 400 and headers.get("content-type") == "application/json":
                    failed = message
                    return
            elif failed is not None:  # errors are sent in one piece
                start, failed = failed, None
                body = _rewritten(message.get("body", b""), start["status"], id)
                MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
                await send(start)
                message = {"type": "http.response.body", "body": body}
            await send(message)

        await self._app(scope, receive, rewriting_send)


def _rewritten(body: bytes, status: int, id: str) -> bytes:
    detail = msgspec.json.decode(body, type=ErrorEnvelope).error
    return msgspec.json.encode(MessagesErrorEnvelope(MessagesError(error_type(status), detail.message),
                                                     request_id=id))
