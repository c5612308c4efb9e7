"""API keys: `Authorization: Bearer KEY` on every route but the few that probes and scrapers call; on Anthropic's
routes `X-Api-Key: KEY` too.

Keys are kept and compared as SHA-256 digests in constant time, all of them on every request, so that neither
a key's length nor its position can be timed. The decision rests on the route's path alone, never on the Host.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from xllm_npu.service.errors import ApiError
from xllm_npu.service.messages_errors import is_messages_route

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})  # unless they are to be protected too
CLIENT = "xllm_npu.client"  # which key a request came with, in its ASGI scope


class ApiKeyMiddleware:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and get_route_path(scope) not in self._open_paths:
            headers = Headers(scope=scope)
            client = self._client(headers.get("authorization", ""))
            if client is None and is_messages_route(scope):  # as Anthropic's clients send it
                client = self._client(f"Bearer {headers.get('x-api-key', '')}")
            if client is None:
                await _refusal().response()(scope, receive, send)
                return
            scope = {**scope, CLIENT: client}
        await self._app(scope, receive, send)

    def _client(self, header: str) -> int | None:
        """The number of the key, or None."""
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return matches.index(True) if scheme.lower() == "bearer" and any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal() -> ApiError:
    return ApiError(401, "Missing or incorrect API key; send it as 'Authorization: Bearer KEY'.",
                    code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
