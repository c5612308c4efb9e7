"""/v1/models: every name under which a model is served, of those that can be asked now or after a wake-up."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from xllm_npu.service.context import ApiContext, Target
from xllm_npu.service.replies import Model, ModelList, json_response


def models_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    def card(target: Target) -> Model:
        info = target.info
        adapter = target.master.adapters.get(target.name) if target.lora_id else None
        if adapter is not None:
            return Model(id=target.name, created=context.created, root=adapter.directory_name,
                         max_model_len=info.max_model_len, parent=adapter.parent or target.model.name)
        return Model(id=target.name, created=context.created, root=info.model_name, max_model_len=info.max_model_len)

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The models that can be asked."""
        names = [name for model in context.models if context.admission.model_error(model) is None
                 for name in (*model.names, *(adapter.name for adapter in model.master.adapters.listed))]
        return json_response(ModelList([card(context.target(name)) for name in names]))

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        """One of them."""
        return json_response(card(context.target(name)))

    return router
