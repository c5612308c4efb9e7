"""/health and /ping for probes, /metrics for Prometheus, /version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from xllm_npu.metrics import CONTENT_TYPE
from xllm_npu.service.context import ApiContext
from xllm_npu.service.errors import unavailable
from xllm_npu.service.replies import Version, json_response
from xllm_npu.version import __version__


def health_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        error = context.admission.engine_error()
        if error is None and not context.master.check_health():
            error = unavailable("The engine does not answer.", "engine_dead")
        return Response(status_code=200) if error is None else error.response()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(context.master.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/version")
    async def version() -> Response:
        return json_response(Version(__version__))

    return router
