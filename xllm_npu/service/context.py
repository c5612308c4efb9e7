"""What every API module is given: the master, the settings of the HTTP side, and who is in flight."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xllm_npu.service.admission import Admission
from xllm_npu.service.errors import model_not_found, unavailable

if TYPE_CHECKING:
    from xllm_npu.master.llm_master import LLMMaster
    from xllm_npu.state.messages import EngineReady


@dataclass(slots=True)
class ApiContext:
    master: LLMMaster
    admission: Admission
    served_model_names: tuple[str, ...] = ()  # empty: the model's own name
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def info(self) -> EngineReady:
        if self.master.info is None:
            raise self.admission.engine_error() or unavailable("The model is not ready.", "engine_loading")
        return self.master.info

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_names or (self.info.model_name,)

    def check_model(self, name: str | None) -> str:
        """The name to answer under; no name means the first."""
        names = self.model_names
        if not name:
            return names[0]
        if name not in names:
            raise model_not_found(name)
        return name
