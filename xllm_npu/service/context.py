"""What every API module is given: the models, who is in flight, and the way from a request to its model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xllm_npu.master.llm_master import ModelSleeping
from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.master.model_set import ModelSet, ServedModel, UnknownModel
from xllm_npu.service.admission import Admission, slot_of
from xllm_npu.service.errors import model_not_found, residency_error, unavailable
from xllm_npu.service.watch import Watch

if TYPE_CHECKING:
    from fastapi import Request

    from xllm_npu.master.llm_master import LLMMaster
    from xllm_npu.master.residency import ResidencyCoordinator
    from xllm_npu.state.messages import EngineReady


@dataclass(slots=True, frozen=True)
class Target:
    """The model that a request is for."""

    name: str  # to answer under: as the request gave it
    model: ServedModel
    info: EngineReady
    lora_id: int = 0  # of the adapter that the request names; 0: it names the model

    @property
    def master(self) -> LLMMaster:
        return self.model.master


@dataclass(slots=True)
class ApiContext:
    models: ModelSet
    admission: Admission
    residency: ResidencyCoordinator
    created: int = field(default_factory=lambda: int(time.time()))

    def target(self, name: str | None) -> Target:
        """By the name that a body gives; none means the first. Raises ApiError for one that cannot be asked now."""
        try:
            model = self.models.of(name)
        except UnknownModel:
            raise model_not_found(name or "") from None
        error = self.admission.model_error(model)
        if error is not None:
            raise error
        if model.master.info is None:
            raise unavailable("The model is not ready.", "engine_loading")
        adapter = None if not name or name in model.names else model.master.adapters.get(name)
        return Target(name or model.name, model, model.master.info, 0 if adapter is None else adapter.id)

    async def use(self, request: Request, target: Target) -> None:
        """Before the model is to generate: until it can, and from then on it is in use until the response has ended.

        Raises ApiError where it sleeps or its queue is full, and what ends the wait where the client leaves or the
        server ends.
        """
        if not self.residency.is_ready(target.model):
            watch = Watch(request.receive)
            async with watch:
                with self.admission.watched(watch):
                    try:
                        await self.residency.ready(target.model)
                    except (ModelSleeping, ResidencyError) as error:
                        raise residency_error(error) from None
        full = self.admission.queue_error(target.model)
        if full is not None:
            raise full
        slot_of(request.scope).use(target.model)
