"""Who may come in: not while no engine can serve, or the server drains, and at most so many generations at once.

`Admission` counts the generations in flight, tells when there are none, and can end them all; it knows too why one
model cannot be asked. The middleware beside it applies, before a body is read, what does not depend on the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.service.errors import ApiError, quote, unavailable
from xllm_npu.service.watch import Watch

if TYPE_CHECKING:
    from xllm_npu.master.model_set import ModelSet, ServedModel

# What occupies an engine: text, or vectors and scores.
GENERATION_PATHS = frozenset({
    "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/messages", "/v1/responses",
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/v2/embed", "/invocations"})
ENGINE_PATHS = frozenset({"/tokenize", "/detokenize", "/tokenizer_info"})  # and all of /v1/
LOADING_RETRY_SECONDS = 5
BUSY_RETRY_SECONDS = 1
SLOT = "xllm_npu.slot"  # of a generation, in its ASGI scope


class Slot:
    """One generation's place among those in flight, and what it uses until its response has ended."""

    def __init__(self, uses: ExitStack) -> None:
        self._uses = uses

    def use(self, model: ServedModel) -> None:
        self._uses.enter_context(model.in_use())


def slot_of(scope: Scope) -> Slot:
    slot = scope[SLOT]
    assert isinstance(slot, Slot)
    return slot


class Admission:
    def __init__(self, models: ModelSet, max_in_flight: int, max_queued: int = 0) -> None:
        self._models = models
        self._max_in_flight, self._max_queued = max_in_flight, max_queued  # 0: no limit
        self._watches: set[Watch] = set()
        self._draining = False
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def drain(self) -> None:
        """From now on every new request gets 503; those in flight go on."""
        self._draining = True

    def abort_all(self, reason: ApiError) -> None:
        """End the generations in flight, each with `reason` as its error body or frame."""
        for watch in list(self._watches):
            watch.interrupt(reason)

    def engine_error(self) -> ApiError | None:
        """Why no request can be served now, whichever model it is for, if so."""
        if self._draining and self._models.alive:
            return unavailable("The server is shutting down.", "shutting_down")
        errors = [self.model_error(model) for model in self._models]
        return errors[0] if all(errors) else None

    def model_error(self, model: ServedModel) -> ApiError | None:
        """Why no request for this model can be served now, if so."""
        master = model.master
        which = f" of the model {quote(model.name)}" if len(self._models) > 1 else ""
        if master.status is EngineStatus.DEAD:
            return unavailable(f"The engine{which} has stopped: {master.failure or 'unknown cause'}", "engine_dead")
        if self._draining:
            return unavailable("The server is shutting down.", "shutting_down")
        if master.status is EngineStatus.RESTARTING:
            return unavailable(f"The engine{which} is being started again: {master.failure}", "engine_restarting",
                               LOADING_RETRY_SECONDS)
        if master.status is EngineStatus.LOADING:
            what = f"The model {quote(model.name)}" if which else "The model"
            return unavailable(f"{what} is still loading; try again shortly.", "engine_loading",
                               LOADING_RETRY_SECONDS)
        return None

    def health_error(self, model: ServedModel) -> ApiError | None:
        """Why this model is not healthy, if so."""
        error = self.model_error(model)
        if error is None and not model.master.check_health():
            which = f" of the model {quote(model.name)}" if len(self._models) > 1 else ""
            error = unavailable(f"The engine{which} does not answer.", "engine_dead")
        return error

    def busy_error(self) -> ApiError | None:
        if not self._max_in_flight or self.in_flight < self._max_in_flight:
            return None
        self._models.first.master.metrics.on_rejected("max_concurrent_requests")
        return ApiError(429, f"The server is busy with {self.in_flight} requests, its limit "
                        "(--max_concurrent_requests); try again shortly.", type="rate_limit_error",
                        code="rate_limit_exceeded", headers={"Retry-After": str(BUSY_RETRY_SECONDS)})

    def queue_error(self, model: ServedModel) -> ApiError | None:
        """Too many requests wait for this model already."""
        if not self._max_queued or model.master.num_waiting < self._max_queued:
            return None
        model.master.metrics.on_rejected("max_queued_requests")
        return ApiError(429, f"{model.master.num_waiting} requests wait for the model already, the limit being "
                        f"{self._max_queued} (--max_queued_requests); try again shortly.", type="rate_limit_error",
                        code="rate_limit_exceeded", headers={"Retry-After": str(BUSY_RETRY_SECONDS)})

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        self.in_flight += 1
        self.idle.clear()
        try:
            with ExitStack() as uses:
                yield Slot(uses)
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self.idle.set()

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """`abort_all` reaches `watch` meanwhile."""
        self._watches.add(watch)
        try:
            yield
        finally:
            self._watches.discard(watch)


def is_generation(scope: Scope) -> bool:
    return scope["method"] == "POST" and get_route_path(scope) in GENERATION_PATHS


class AdmissionMiddleware:
    """Applies `Admission` by path, before the body is read; a slot is held until the response has ended."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope) if scope["type"] == "http" else ""
        if not path.startswith("/v1/") and path not in ENGINE_PATHS and path not in GENERATION_PATHS:
            await self._app(scope, receive, send)
            return
        generates = is_generation(scope)
        error = self._admission.engine_error()
        if error is None and generates:
            error = self._admission.busy_error()
        if error is not None:
            await error.response()(scope, receive, send)
        elif generates:
            with self._admission.slot() as slot:
                await self._app({**scope, SLOT: slot}, receive, send)
        else:
            await self._app(scope, receive, send)
