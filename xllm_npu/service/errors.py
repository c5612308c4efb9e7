"""Failures as OpenAI's envelope, {"error": {"message", "type", "param", "code"}}, for bodies and for SSE frames.

`ApiError` is what the rest of the room raises; `ErrorBoundary` turns whatever else escapes into a generic 500
and keeps the details for the log. Knows nothing of requests and of the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xllm_npu.master.llm_master import ModelSleeping
from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.service.watch import ClientGone
from xllm_npu.state.sampling_params import InvalidParameter

logger = logging.getLogger("xllm_npu.service")

MAX_MESSAGE_CHARS = 1000  # a message that quotes input or a cause must not become the payload
MAX_QUOTED_CHARS = 200


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """A failure with its HTTP status; `message` is for the client and says what to change."""

    def __init__(self, status: int, message: str, *, type: str = "invalid_request_error",
                 param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 3] + "..."
        return msgspec.json.encode(ErrorEnvelope(ErrorDetail(message, self.type, self.param, self.code)))

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def quote(value: object) -> str:
    """`value` as it may appear in a message: cut, on one line."""
    if isinstance(value, str | bytes):
        value = value[: MAX_QUOTED_CHARS + 1]
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "..."


def invalid(error: InvalidParameter) -> ApiError:
    return ApiError(400, error.message, param=error.param)


@contextmanager
def renamed_faults(names: Mapping[str, str]) -> Iterator[None]:
    """Faults found in another API's form of the request: the first of `names` that the field's name has."""
    try:
        yield
    except InvalidParameter as error:
        param, message = error.param, error.message
        for name, here in names.items():
            if name in param:
                raise InvalidParameter(param.replace(name, here), message.replace(name, here)) from None
        raise


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"The model {quote(name)} does not exist; GET /v1/models lists what is served.",
                    param="model", code="model_not_found")


def internal_error(message: str = "The server had an error while processing the request.") -> ApiError:
    return ApiError(500, message, type="server_error", code="internal_error")


def unavailable(message: str, code: str, retry_after: int | None = None) -> ApiError:
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else None
    return ApiError(503, message, type="server_error", code=code, headers=headers)


# Code of a ResidencyError -> HTTP status, code of the error, seconds after which to try again.
_RESIDENCY_ERRORS: dict[str, tuple[int, str, int | None]] = {
    "invalid": (400, "invalid_value", None), "unsupported": (400, "not_supported", None),
    "asleep": (409, "model_sleeping", None), "not_ready": (503, "engine_loading", 5),
    "memory": (503, "insufficient_memory", 5), "gone": (503, "engine_dead", None),
    "checkpoint": (400, "invalid_checkpoint", None), "shared": (409, "conflict", None),
}  # fmt: skip
SLEEPING_RETRY_SECONDS = 10


def residency_error(error: ModelSleeping | ResidencyError) -> ApiError:
    """Why a model is not awake, or cannot become what was asked."""
    if isinstance(error, ModelSleeping):
        return unavailable(str(error), "model_sleeping", SLEEPING_RETRY_SECONDS)
    status, code, retry_after = _RESIDENCY_ERRORS.get(error.code, (503, error.code, None))
    if status == 503:
        return unavailable(error.message, code, retry_after)
    return ApiError(status, error.message, code=code)


def add_error_handlers(app: FastAPI) -> None:
    """Every failure that FastAPI itself would answer gets our envelope."""

    def on_api_error(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, ApiError)
        return exc.response()

    def on_invalid(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, InvalidParameter)
        return invalid(exc).response()

    def on_http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return _routing_error(request, exc).response()

    def on_validation(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return ApiError(400, "The request's path or query string is malformed.").response()

    def on_client_gone(_: Request, exc: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the log does

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(InvalidParameter, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def _routing_error(request: Request, exc: HTTPException) -> ApiError:
    where = f"{request.method} {quote(request.url.path)[1:-1]}"
    headers = dict(exc.headers) if exc.headers else None
    if exc.status_code == 404:
        return ApiError(404, f"Invalid URL ({where}).", code="unknown_url", headers=headers)
    if exc.status_code == 405:
        return ApiError(405, f"Method not allowed ({where}).", code="method_not_supported", headers=headers)
    return ApiError(exc.status_code, "The request could not be handled.", headers=headers)


class ErrorBoundary:
    """Innermost middleware: an exception nobody expected becomes a generic 500, or ends a begun response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            logger.exception("unexpected failure in %s %s", scope["method"], scope["path"])
            if started:
                raise  # the connection is closed: a half body must not look whole
            await internal_error().response()(scope, receive, send)
