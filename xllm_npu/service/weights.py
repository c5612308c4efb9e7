"""Admin routes about weights: replacing those of a model, in place, by those of another checkpoint; and what they are.

Two spellings of the replacement: ours, and SGLang's `/update_weights_from_disk`, whose `weight_version` is a name that
an operator gives weights in both. What either could ask and is not there is refused by the field's name.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.master.model_set import ModelSet, ServedModel
from xllm_npu.service.errors import residency_error, unavailable
from xllm_npu.state.messages import MAX_CHECKPOINT_CHARS
from xllm_npu.state.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from xllm_npu.service.admin import AdminCall
    from xllm_npu.state.messages import EngineReady

MAX_LABEL_CHARS = 128
LOAD_FORMATS = ("auto", "safetensors")
# Of SGLang's fields: what true, or anything at all, would ask.
REFUSED = {
    "is_async": "the answer comes when the weights are replaced",
    "keep_pause": "pause the model before, with /pause: it stays paused then",
    "manifest": "give the directory of a checkpoint in model_path",
}
FROM_TRAINER = ("update_info is not available: weights come from the files of a checkpoint in this version, and not "
                "from a trainer's memory. Give its directory in path.")


class Updated(msgspec.Struct):
    status: str
    path: str
    version: int  # updates since the server started
    seconds: float  # from the request to this answer


class UpdatedFromDisk(Updated, kw_only=True):
    success: bool = True
    message: str = "The weights are replaced."


class WeightInfo(msgspec.Struct):
    model: str
    path: str  # as it was given
    version: int  # updates since the server started
    weight_version: str  # what the operator calls them; else `version`
    bytes: int  # in the memory of all ranks
    dtype: str
    parameters: int  # of the checkpoint


class WorldSize(msgspec.Struct):
    world_size: int


class WeightRoutes:
    def __init__(self, models: ModelSet) -> None:
        self._models = models

    async def update(self, call: AdminCall) -> Updated:
        if call.given("update_info") is not None:
            raise InvalidParameter("update_info", FROM_TRAINER)
        return await self._update(call, call.model(), "path", call.text("mode") or "abort")

    async def update_from_disk(self, call: AdminCall) -> UpdatedFromDisk:
        load_format = call.text("load_format") or LOAD_FORMATS[0]
        if load_format not in LOAD_FORMATS:
            raise InvalidParameter("load_format", f"load_format must be one of {', '.join(LOAD_FORMATS)}.")
        if call.given("flush_cache") is not None and not call.flag("flush_cache"):
            raise InvalidParameter("flush_cache", "flush_cache cannot be false: what was computed with the old weights "
                                   "is always forgotten.")
        for name, instead in REFUSED.items():
            if call.given(name):
                raise InvalidParameter(name, f"{name} is not available: {instead}.")
        mode = "abort" if call.flag("abort_all_requests") else "wait"
        done = await self._update(call, call.model(), "model_path", mode)
        return UpdatedFromDisk(done.status, done.path, done.version, done.seconds)

    async def _update(self, call: AdminCall, model: ServedModel, param: str, mode: str) -> Updated:
        began, path, label = time.monotonic(), call.text(param), call.text("weight_version")
        if not path:
            raise InvalidParameter(param, f"{param} is required: the directory or hub id of the new weights.")
        if len(path) > MAX_CHECKPOINT_CHARS or not path.isprintable():
            raise InvalidParameter(param, f"{param} is no path: it must be printable, and at most "
                                   f"{MAX_CHECKPOINT_CHARS} characters long.")
        if len(label) > MAX_LABEL_CHARS or not label.isprintable():
            raise InvalidParameter("weight_version", "weight_version must be printable, and at most "
                                   f"{MAX_LABEL_CHARS} characters long.")
        try:
            version = await self._models.update_weights(model, path, mode, label)
        except ResidencyError as error:
            raise residency_error(error) from None
        return Updated("updated", path, version, round(time.monotonic() - began, 3))

    def info(self, call: AdminCall) -> WeightInfo:
        model = call.model()
        ready, weights = _ready(model), model.master.weights
        loaded = _ready_of_owner(model)
        return WeightInfo(
            model=model.name, path=weights.checkpoint, version=weights.version,
            weight_version=weights.label or str(weights.version), bytes=sum(load.bytes for load in ready.weight_loads),
            dtype=ready.dtype, parameters=max((load.parameters for load in loaded.weight_loads), default=0))

    def world_size(self, call: AdminCall) -> WorldSize:
        ready = _ready(call.model())
        alone = call.given("include_dp") is not None and not call.flag("include_dp")
        return WorldSize(ready.ranks // ready.engines if alone else ready.ranks)


def _ready(model: ServedModel) -> EngineReady:
    if model.master.info is None:
        raise unavailable("The model is not loaded.", "engine_loading", 5)
    return model.master.info


def _ready_of_owner(model: ServedModel) -> EngineReady:
    """Of who has read the weights: a fork has not."""
    master = model.master
    while master.parent is not None:
        master = master.parent
    return master.info or _ready(model)
