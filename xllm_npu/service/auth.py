"""API keys: `Authorization: Bearer KEY` on every route but the few that probes and scrapers call; on Anthropic's
routes `X-Api-Key: KEY` too.

Keys are kept and compared as SHA-256 digests in constant time, all of them on every request, so that neither
a key's length nor its position can be timed. The decision rests on the route's path alone, never on the Host.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from xllm_npu.service.errors import ApiError
from xllm_npu.service.messages_errors import is_messages_route

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and get_route_path(scope) not in OPEN_PATHS:
            headers = Headers(scope=scope)
            given = [headers.get("authorization", "")]
            if is_messages_route(scope):
                given.append(f"Bearer {headers.get('x-api-key', '')}")  # as Anthropic's clients send it
            if not any(self._allowed(header) for header in given):
                await _refusal().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allowed(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal() -> ApiError:
    return ApiError(401, "Missing or incorrect API key; send it as 'Authorization: Bearer KEY'.",
                    code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
