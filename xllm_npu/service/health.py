"""/health and /ping for probes, /load for balancers, /metrics for Prometheus, /version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from xllm_npu.metrics import CONTENT_TYPE, render
from xllm_npu.service.context import ApiContext
from xllm_npu.service.replies import Load, Version, json_response
from xllm_npu.version import __version__


def health_router(context: ApiContext, vllm_names: bool = False) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """200 where every model can serve or sleeps."""
        for model in context.models:
            error = context.admission.health_error(model)
            if error is not None:
                return error.response()
        return Response(status_code=200)

    @router.get("/load")
    async def load() -> Response:
        """Generations in flight."""
        return json_response(Load(context.admission.in_flight))

    @router.get("/metrics")
    async def metrics() -> Response:
        """Every model's metrics, for Prometheus."""
        text = render([model.master.metrics for model in context.models], vllm_names)
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/version")
    async def version() -> Response:
        """This server's version."""
        return json_response(Version(__version__))

    return router
