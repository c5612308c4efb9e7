"""POST /invocations: SageMaker's one route for everything, answered by the route that the body is for.

Which one that is follows from the body's fields and from what the model gives, as in vLLM. The request goes through
this application's own routes once more, under the other path; API key, limits and admission have been applied.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_npu.service.body import read_json
from xllm_npu.service.context import ApiContext
from xllm_npu.service.errors import ApiError

# A field that only requests of this route have, in the order in which they are looked for.
ROUTES = (("messages", "/v1/chat/completions"), ("prompt", "/v1/completions"), ("query", "/rerank"),
          ("queries", "/score"), ("text_1", "/score"), ("texts", "/v2/embed"), ("task", "/pooling"))


class Redirected(Response):
    """The answer of another route to the same request."""

    def __init__(self, routes: ASGIApp, path: str, body: bytes) -> None:
        super().__init__()
        self._routes, self._path, self._body = routes, path, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + self._path
        unread = [self._body]

        async def receive_again() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self._routes({**scope, "path": path, "raw_path": path.encode()}, receive_again, send)


def invocations_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/invocations")
    async def invocations(request: Request) -> Response:
        """SageMaker's: whichever of the other routes the body is for."""
        body = await read_json(request)
        return Redirected(request.app.router, _path(context, body), await request.body())

    return router


def _path(context: ApiContext, body: dict[str, Any]) -> str:
    path = next((path for field, path in ROUTES if field in body), None)
    if path is None and "input" in body:
        name = body.get("model")
        pooling = context.target(name if isinstance(name, str) else None).info.pooling
        path = "/classify" if pooling is not None and pooling.task == "classify" else "/v1/embeddings"
    if path is None:
        raise ApiError(400, f"The body is for none of the routes: it has neither input nor "
                       f"{', '.join(field for field, _ in ROUTES)}.", code="unknown_request")
    return path
