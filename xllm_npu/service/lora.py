"""Loading and unloading LoRA adapters while the server runs, as vLLM's routes do it.

On the API's listener where --allow_runtime_lora_updating is on: who may call them has the server read any directory
that it can read. On the admin listener wherever a model takes adapters.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from xllm_npu.master.adapters import AdapterError
from xllm_npu.master.engine_group import EnginesGone
from xllm_npu.master.llm_master import EngineDeadError
from xllm_npu.master.model_set import ModelSet, ServedModel, UnknownModel
from xllm_npu.service.body import read_json
from xllm_npu.service.errors import ApiError, model_not_found, quote, unavailable
from xllm_npu.service.protocol import Body, parse
from xllm_npu.state.sampling_params import InvalidParameter


class LoadLoraBody(Body):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadLoraBody(Body):
    lora_name: str


def lora_router(models: ModelSet, allowed: bool) -> APIRouter:
    """`allowed`: by --allow_runtime_lora_updating."""
    router = APIRouter()
    routes = LoraRoutes(models)

    def check() -> None:
        if not allowed:
            raise ApiError(403, "Adapters are not loaded or unloaded by clients here: start the server with "
                           "--enable_lora --allow_runtime_lora_updating, or use its admin port.", code="forbidden")

    @router.post("/v1/load_lora_adapter", response_model=None)
    async def load_lora_adapter(request: Request) -> Response:
        """Serve a LoRA adapter of a directory on the server."""
        check()
        return await routes.load(await read_json(request))

    @router.post("/v1/unload_lora_adapter", response_model=None)
    async def unload_lora_adapter(request: Request) -> Response:
        """Serve it no longer; requests that are open go on."""
        check()
        return await routes.unload(await read_json(request))

    return router


class LoraRoutes:
    """What both listeners share: bodies in, replies out. They raise ApiError and InvalidParameter."""

    def __init__(self, models: ModelSet) -> None:
        self._models = models

    async def load(self, given: dict[str, Any]) -> Response:
        body = parse(LoadLoraBody, given)
        model, name = self._model(body), body.lora_name
        if model.master.adapters.get(name) is None and self._models.is_taken(name):
            raise InvalidParameter("lora_name", f"lora_name: a model is called {quote(name)} already.")
        await _answered(model.master.adapters.load(name, body.lora_path, bool(body.load_inplace)))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, given: dict[str, Any]) -> Response:
        body = parse(UnloadLoraBody, given)
        name = body.lora_name
        holder = next((model for model in self._models if model.master.adapters.get(name) is not None), None)
        await _answered((holder or self._model(body)).master.adapters.unload(name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _model(self, body: Body) -> ServedModel:
        """The one that `model` names, or the only one that takes adapters."""
        if body.model is not None:
            try:
                return self._models.of(body.model)
            except UnknownModel:
                raise model_not_found(body.model) from None
        able = [model for model in self._models if model.master.adapters.enabled]
        if len(able) > 1:
            names = ", ".join(model.name for model in able)
            raise InvalidParameter("model", f"model must name one of {names}.")
        return able[0] if able else self._models.first


async def _answered(change: Awaitable[None]) -> None:
    try:
        await change
    except AdapterError as error:
        raise ApiError(error.status, str(error), param=error.param or None,
                       code="not_found" if error.status == 404 else None) from None
    except (EnginesGone, EngineDeadError) as error:
        raise unavailable(str(error), "engine_dead") from None
