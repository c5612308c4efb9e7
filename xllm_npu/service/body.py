"""Request bodies: bounded while they stream in, JSON only, at most 64 levels deep, an object at the top.

Decoding is msgspec's, which refuses NaN, infinities, lone surrogates and invalid UTF-8.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_npu.service.errors import ApiError
from xllm_npu.service.watch import ClientGone

MAX_JSON_DEPTH = 64
LARGE_BODY = 1 << 18  # bytes from which decoding leaves the event loop


class BodyLimitMiddleware:
    """413 for a body over `max_bytes`: at once if it is announced, else at the byte that exceeds it.

    The connection stays usable: the server reads the rest of the body and drops it, so that a client that
    writes before it reads still sees the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, bounded_receive, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request body is larger than this server's limit of {self._max_bytes} bytes.",
                        code="request_too_large")


async def read_json(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object, or an ApiError that says what is wrong with it."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "The body must be JSON, with the header 'Content-Type: application/json'.",
                       code="unsupported_media_type")
    body = await read_body(request)
    if len(body) < LARGE_BODY:
        return decode_object(body)
    return await asyncio.to_thread(decode_object, body)


async def read_body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientGone from None


def decode_object(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as exc:
        raise ApiError(400, f"The body is not valid JSON: {exc}.", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    # A body with few brackets cannot be deep; most requests skip the walk.
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH and depth_exceeds(value, MAX_JSON_DEPTH):
        raise _too_deep()
    return value


def depth_exceeds(value: Any, limit: int) -> bool:
    """Level by level, so that our own recursion limit plays no part."""
    level = [value]
    for _ in range(limit):
        below = []
        for node in level:
            children = node.values() if type(node) is dict else node
            below += [child for child in children if type(child) is dict or type(child) is list]
        if not below:
            return False
        level = below
    return True


def _too_deep() -> ApiError:
    return ApiError(400, f"The body is nested deeper than {MAX_JSON_DEPTH} levels.", code="invalid_json")
