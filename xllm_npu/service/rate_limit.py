"""Requests a minute for each client: a token bucket for every API key, or for every address where there are no keys.

A bucket holds a minute's worth, so that a client may use it all at once and then gets one request every 60/n seconds.
Buckets are bounded: the address that was quiet longest is forgotten, which only ever favours it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from xllm_npu.service.auth import CLIENT
from xllm_npu.service.errors import ApiError

MAX_CLIENTS = 10_000


class RateLimit:
    def __init__(self, requests_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = float(requests_per_minute)
        self._per_second = requests_per_minute / 60
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> what is left, when

    def take(self, client: str) -> float:
        """0.0 where the client may come in, else the seconds until it may."""
        now = self._clock()
        left, since = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_second)
        wait = 0.0 if left >= 1 else (1 - left) / self._per_second
        self._buckets[client] = (left if wait else left - 1, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait


class RateLimitMiddleware:
    """429 before a body is read. `limited` says by path and method what counts."""

    def __init__(
        self, app: ASGIApp, requests_per_minute: int, limited: Callable[[Scope], bool],
        on_rejected: Callable[[str], None],
    ) -> None:
        self._app = app
        self._limit, self._per_minute = RateLimit(requests_per_minute), requests_per_minute
        self._limited, self._on_rejected = limited, on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait = self._limit.take(client_of(scope)) if scope["type"] == "http" and self._limited(scope) else 0.0
        if not wait:
            await self._app(scope, receive, send)
            return
        self._on_rejected("requests_per_minute")
        await self._refusal(wait).response()(scope, receive, send)

    def _refusal(self, wait: float) -> ApiError:
        return ApiError(
            429, f"You may make {self._per_minute} requests a minute (--requests_per_minute); try again in "
            f"{math.ceil(wait)} s.", type="rate_limit_error", code="rate_limit_exceeded",
            headers={"Retry-After": str(math.ceil(wait)), "X-RateLimit-Limit-Requests": str(self._per_minute),
                     "X-RateLimit-Remaining-Requests": "0", "X-RateLimit-Reset-Requests": f"{wait:.3f}s"})


def client_of(scope: Scope) -> str:
    """Whose request it is: the API key's number, else the address that the connection comes from."""
    key = scope.get(CLIENT)
    if key is not None:
        return f"key {key}"
    address = scope.get("client")
    return address[0] if address else ""
