"""The admin application: sleep, wake-up, pause, fork and status of each model, its weights and cached prefixes,
profiles of its steps, and its settings; on a listener of its own.

Two spellings of the same: bodies as xLLM's (MasterInfos), and query parameters as vLLM's. Which model is meant is
`model` (query or body) or `model_id` (body); where there is one model it need not be named. Every route may be called
again: what already holds is answered with 200.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from xllm_npu.master.engine_group import CommandFailed
from xllm_npu.master.llm_master import EngineDeadError
from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.master.model_set import ModelSet, ServedModel, UnknownModel
from xllm_npu.service.auth import ApiKeyMiddleware
from xllm_npu.service.body import BodyLimitMiddleware, decode_object, read_body
from xllm_npu.service.errors import (
    ApiError,
    ErrorBoundary,
    add_error_handlers,
    model_not_found,
    quote,
    residency_error,
    unavailable,
)
from xllm_npu.service.lora import LoraRoutes
from xllm_npu.service.request_id import RequestIdMiddleware
from xllm_npu.service.weights import WeightRoutes
from xllm_npu.state.messages import PAUSED, SLEEPING, EngineCommand, EngineReady, Profile, ResetPrefixCache
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.version import __version__

if TYPE_CHECKING:
    from xllm_npu.config.service import ServiceSettings
    from xllm_npu.master.residency import ResidencyCoordinator

MAX_BODY_BYTES = 2**16
# xLLM's MasterStatus: how much of a model is there. Numbers and names of its enumeration -> level of sleep.
SLEEP_LEVELS: Mapping[Any, int] = {
    0: 0, "0": 0, "WAKEUP": 0, 1: 1, "1": 1, "LIGHT_SLEEP": 1, 2: 2, "2": 2, "DEEP_SLEEP": 2,
}  # fmt: skip
# Of MasterInfos: weights from, and ranks on, other machines.
ELSEWHERE = ("remote_addrs", "src_weight_segments")


class IsSleeping(msgspec.Struct):
    is_sleeping: bool


class IsPaused(msgspec.Struct):
    is_paused: bool


class Done(msgspec.Struct):
    status: str


class Aborted(msgspec.Struct):
    aborted: int


class WeightsStatus(msgspec.Struct):
    path: str  # as it was given
    version: int  # updates since the server started


class ModelStatus(msgspec.Struct):
    """Times in seconds, memory in bytes."""

    id: str
    names: list[str]
    status: str  # of the engines: loading, ready, sleeping, restarting, dead
    failure: str | None
    state: str  # awake, paused, sleeping
    level: int
    tags: list[str]  # whose memory is there
    since: float  # time of the last change of state
    transition: str  # sleep, wake, pause, resume, update, while one goes on
    last_seconds: dict[str, float]  # of the last of each transition
    freed_bytes: int  # by the last sleep
    weights: WeightsStatus
    requests: int  # that run or wait
    idle_seconds: float
    virtual_memory_info: dict[str, Any]


class ServerStatus(msgspec.Struct):
    version: str
    tasks: int  # asyncio tasks of the HTTP process, this request's among them
    models: list[ModelStatus]


class ModelInfo(msgspec.Struct):
    id: str
    settings: dict[str, Any]
    engine: EngineReady | None


class ServerInfo(msgspec.Struct):
    version: str
    models: list[ModelInfo]


def create_admin_app(models: ModelSet, residency: ResidencyCoordinator, service: ServiceSettings) -> FastAPI:
    app = FastAPI(title="xllm-npu admin", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    routes = AdminRoutes(models, residency, service.profile_dir or "")
    for path, handler in routes.posts().items():
        app.add_api_route(path, handler, methods=["POST"], response_model=None)
    for path, handler in routes.gets().items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    add_error_handlers(app)
    app.add_middleware(ErrorBoundary)
    app.add_middleware(BodyLimitMiddleware, max_bytes=MAX_BODY_BYTES)
    if service.api_key:
        app.add_middleware(ApiKeyMiddleware, api_keys=service.api_key)
    app.add_middleware(RequestIdMiddleware)
    return app


Handler = Callable[[Request], Awaitable[Response]]


class AdminRoutes:
    def __init__(self, models: ModelSet, residency: ResidencyCoordinator, profile_dir: str = "") -> None:
        self._models = models
        self._residency = residency
        self._profile_dir = profile_dir
        self._lora = LoraRoutes(models)
        self._weights = WeightRoutes(models)

    def posts(self) -> dict[str, Handler]:
        return {"/sleep": self.sleep, "/wakeup": self.wake_up, "/wake_up": self.wake_up, "/pause": self.pause,
                "/resume": self.resume, "/fork_master": self.fork_master,
                "/reset_prefix_cache": self.reset_prefix_cache, "/start_profile": self.start_profile,
                "/stop_profile": self.stop_profile, "/v1/load_lora_adapter": self.load_lora_adapter,
                "/v1/unload_lora_adapter": self.unload_lora_adapter, "/update_weights": self.update_weights,
                "/update_weights_from_disk": self.update_weights_from_disk, "/abort_requests": self.abort_requests}

    def gets(self) -> dict[str, Handler]:
        return {"/is_sleeping": self.is_sleeping, "/is_paused": self.is_paused, "/status": self.status,
                "/server_info": self.server_info, "/weight_info": self.weight_info,
                "/get_world_size": self.world_size}

    async def sleep(self, request: Request) -> Response:
        """Give the memory of weights and KV cache back."""
        call = await self._read(request)
        level = call.number("level")
        if level is None:
            level = call.sleep_level(1)
        with_mode = call.text("mode") or "abort"
        await _answered(self._residency.sleep(call.model(), level, with_mode))
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """Take it again."""
        call = await self._read(request)
        await _answered(self._residency.wake(call.model(), call.texts("tags")))
        return Response(status_code=200)

    async def pause(self, request: Request) -> Response:
        """Run no steps, and keep the memory."""
        call = await self._read(request)
        await _answered(call.model().master.pause(call.text("mode") or "abort"))
        return _json(Done("paused"))

    async def resume(self, request: Request) -> Response:
        """Run steps again."""
        call = await self._read(request)
        await _answered(call.model().master.resume())
        return _json(Done("resumed"))

    async def fork_master(self, request: Request) -> Response:
        """Serve a model under another name too, with the same weights."""
        call = await self._read(request)
        new_name = call.text("model_id")
        if not new_name:
            raise InvalidParameter("model_id", "model_id is required: the name of the new model.")
        for name in ELSEWHERE:
            if call.given(name):
                raise InvalidParameter(name, f"{name} is not available in this version: a fork shares the weights of "
                                       "a model of this server.")
        source, level = call.fork_source(), call.sleep_level(0)
        call.check_shape(source)
        await _answered(self._fork(source, new_name, level))
        return Response(status_code=200)

    async def _fork(self, source: ServedModel, new_name: str, level: int) -> None:
        fork = await self._models.fork(source.name, new_name)
        if level:
            await self._residency.sleep(fork, level, "wait")

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes."""
        call = await self._read(request)
        if call.flag("reset_running_requests"):
            raise InvalidParameter("reset_running_requests", "reset_running_requests is not available: requests that "
                                   "run keep their KV blocks; /sleep?mode=keep takes them.")
        await _commanded(call.model(), ResetPrefixCache())
        return Response(status_code=200)

    async def start_profile(self, request: Request) -> Response:
        """Trace the steps of every rank, into `--profile-dir`."""
        call = await self._read(request)
        if not self._profile_dir:
            raise ApiError(400, "There is no directory for profiles: start the server with --profile_dir.",
                           code="not_supported")
        await _commanded(call.model(), Profile(self._profile_dir))
        return Response(status_code=200)

    async def stop_profile(self, request: Request) -> Response:
        """End that, and write the traces."""
        call = await self._read(request)
        await _commanded(call.model(), Profile(""))
        return Response(status_code=200)

    async def load_lora_adapter(self, request: Request) -> Response:
        """Serve a LoRA adapter of a directory on the server."""
        return await self._lora.load((await self._read(request)).body)

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Serve it no longer; requests that are open go on."""
        return await self._lora.unload((await self._read(request)).body)

    async def update_weights(self, request: Request) -> Response:
        """Replace a model's weights, in place, by those of another checkpoint."""
        return _json(await self._weights.update(await self._read(request)))

    async def update_weights_from_disk(self, request: Request) -> Response:
        """The same in SGLang's words."""
        return _json(await self._weights.update_from_disk(await self._read(request)))

    async def abort_requests(self, request: Request) -> Response:
        """End open requests by their ids, or all of a model; each is answered with what it has so far."""
        call = await self._read(request)
        ids = call.texts("request_ids")
        models = [call.model()] if not ids or call.text("model") else list(self._models)
        return _json(Aborted(sum(model.master.abort(ids) for model in models)))

    async def weight_info(self, request: Request) -> Response:
        """Where a model's weights come from, and how large they are."""
        return _json(self._weights.info(await self._read(request)))

    async def world_size(self, request: Request) -> Response:
        """How many devices a model has; with include_dp=false one of its data-parallel engines."""
        return _json(self._weights.world_size(await self._read(request)))

    async def server_info(self, request: Request) -> Response:
        """Every model's settings, keys masked, and what its engines said of themselves when they were ready."""
        await self._read(request)
        return _json(ServerInfo(__version__, [
            ModelInfo(model.name, model.master.settings.model_dump(mode="json"), model.master.info)
            for model in self._models]))

    async def is_sleeping(self, request: Request) -> Response:
        """Whether a model sleeps."""
        call = await self._read(request)
        return _json(IsSleeping(call.model().master.residency.state == SLEEPING))

    async def is_paused(self, request: Request) -> Response:
        """Whether a model is paused."""
        call = await self._read(request)
        return _json(IsPaused(call.model().master.residency.state == PAUSED))

    async def status(self, request: Request) -> Response:
        """What every model is and has."""
        return _json(ServerStatus(__version__, len(asyncio.all_tasks()), [_status_of(model) for model in self._models]))

    async def _read(self, request: Request) -> AdminCall:
        # A page in a browser can send requests to this machine, and names itself in this header.
        if "origin" in request.headers:
            raise ApiError(403, "The admin routes are not for browsers.", code="forbidden")
        body = await read_body(request)
        return AdminCall(self._models, request, decode_object(body) if body.strip() else {})


@dataclass(slots=True)
class AdminCall:
    """What a request says, in its query or its body; the query wins."""

    models: ModelSet
    request: Request
    body: dict[str, Any]

    def given(self, name: str) -> Any:
        return self.request.query_params.get(name) or self.body.get(name)

    def text(self, name: str) -> str:
        value = self.given(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise InvalidParameter(name, f"{name} must be a string, got {quote(value)}.")
        return value

    def texts(self, name: str) -> list[str]:
        values = self.request.query_params.getlist(name) or self.body.get(name) or []
        values = [values] if isinstance(values, str) else values
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InvalidParameter(name, f"{name} must be a list of strings, got {quote(values)}.")
        return [part for value in values for part in value.split(",") if part]

    def flag(self, name: str) -> bool:
        value = self.given(name)
        if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
            value = value.lower() in ("true", "1")
        if value is not None and type(value) is not bool:
            raise InvalidParameter(name, f"{name} must be true or false, got {quote(value)}.")
        return bool(value)

    def number(self, name: str) -> int | None:
        value = self.given(name)
        if isinstance(value, str) and len(value) < 10 and value.isascii() and value.isdigit():
            value = int(value)
        if value is not None and type(value) is not int:
            raise InvalidParameter(name, f"{name} must be a number, got {quote(value)}.")
        return value

    def sleep_level(self, default: int) -> int:
        """Of master_status."""
        value = self.body.get("master_status")
        if value is None:
            return default
        level = SLEEP_LEVELS.get(value) if isinstance(value, str | int) else None
        if level is None:
            raise InvalidParameter("master_status", "master_status must be WAKEUP, LIGHT_SLEEP or DEEP_SLEEP, "
                                   f"got {quote(value)}.")
        return level

    def model(self) -> ServedModel:
        name = self.text("model") or self.text("model_id")
        if not name and len(self.models) > 1:
            names = ", ".join(model.name for model in self.models)
            raise InvalidParameter("model", f"model must name one of {names}.")
        return self._named(name)

    def fork_source(self) -> ServedModel:
        """By `model`, or by model_path, the model that it was loaded from."""
        path = self.text("model_path")
        if self.text("model") or not path:
            if not self.text("model") and len(self.models) > 1:
                raise InvalidParameter("model_path", "model_path must be that of a model of this server, or model its "
                                       "name.")
            return self._named(self.text("model"))
        for model in self.models:
            if path in (model.master.settings.model.model, *model.names):
                return model
        raise InvalidParameter("model_path", f"model_path: no model of this server was loaded from {quote(path)}; a "
                               "fork shares the weights of one that was.")

    def check_shape(self, source: ServedModel) -> None:
        """A fork has as many ranks as the model whose weights it shares."""
        settings = source.master.settings
        for name, have in (("nnodes", settings.distributed.nnodes), ("dp_size", settings.parallel.dp_size)):
            if self.number(name) not in (None, 0, have):
                raise InvalidParameter(name, f"{name} must be that of the model {source.name}, {have}.")

    def _named(self, name: str) -> ServedModel:
        try:
            return self.models.of(name)
        except UnknownModel:
            raise model_not_found(name) from None


async def _answered(transition: Awaitable[object]) -> None:
    try:
        await transition
    except ResidencyError as error:
        raise residency_error(error) from None


async def _commanded(model: ServedModel, command: EngineCommand) -> None:
    try:
        await model.master.command(command)
    except EngineDeadError as error:
        raise unavailable(str(error), "engine_dead") from None
    except CommandFailed as error:
        raise ApiError(409, str(error), code="conflict") from None


def _status_of(model: ServedModel) -> ModelStatus:
    master, state = model.master, model.master.residency
    return ModelStatus(
        id=model.name, names=list(model.names), status=master.status.value, failure=master.failure,
        state=state.state, level=state.level, tags=list(state.tags), since=state.since, transition=state.transition,
        last_seconds=state.last_seconds, freed_bytes=state.freed_bytes,
        weights=WeightsStatus(master.weights.checkpoint, master.weights.version), requests=model.in_flight,
        idle_seconds=0.0 if model.in_flight else round(time.monotonic() - model.last_use, 3),
        virtual_memory_info=master.virtual_memory_info())


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
