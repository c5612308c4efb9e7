"""/v1/models: the names under which the one model is served."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from xllm_npu.service.context import ApiContext
from xllm_npu.service.replies import Model, ModelList, json_response


def models_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    def card(name: str) -> Model:
        info = context.info
        return Model(id=name, created=context.created, root=info.model_name, max_model_len=info.max_model_len)

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response(ModelList([card(name) for name in context.model_names]))

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(card(context.check_model(name)))

    return router
