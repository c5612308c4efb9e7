"""One rank's adapters: read from their directories, kept in host memory, put into the model's slots.

An adapter is known by a number that the server gives it and never gives again. Where ranks share a model, each reads
its part and none has the adapter unless all do. Which adapter lies in which slot is the scheduler's choice.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from xllm_models.layers.lora import LoraSlots, Matrices, attach_lora
from xllm_models.weights.lora_adapter import LoraError, read_lora
from xllm_platform.collectives import all_reduce
from xllm_platform.parallel import Group

log = logging.getLogger(__name__)


class LoraWorker:
    def __init__(self, model: Any, max_loras: int, max_rank: int, group: Group) -> None:
        """`group`: the ranks that the model is cut over."""
        self._slots: LoraSlots = attach_lora(model, max_loras, max_rank)
        self._dtype, self._device, self._group = model.dtype, model.device, group
        names = (name.rpartition(".")[0] for name in model.placements())
        self._modules = frozenset(names)
        self._adapters: dict[int, dict[str, Matrices]] = {}  # this rank's parts, on the host
        log.info("%d slots for adapters of rank %d and below take %.1f MiB", max_loras, max_rank,
                 self._slots.nbytes / 2**20)

    def load(self, lora_id: int, path: str) -> None:
        """Read an adapter; all ranks of the group call it together. Raises LoraError on all if one cannot."""
        failure: LoraError | None = None
        try:
            self._adapters[lora_id] = self._read(Path(path).expanduser())
        except LoraError as error:
            failure = error
        if self._group.size > 1:
            done = torch.tensor([failure is None], dtype=torch.int64, device=self._device)
            if not all_reduce(done, self._group, "min").item() and failure is None:
                failure = LoraError("A rank on another machine cannot read the adapter.")
        if failure is not None:
            self._adapters.pop(lora_id, None)
            raise failure

    def unload(self, lora_id: int) -> None:
        """Forget it; harmless for one that is not there. No later step uses it."""
        self._adapters.pop(lora_id, None)

    def put(self, slot: int, lora_id: int) -> None:
        """Into a slot, before the next step."""
        self._slots.put(slot, self._adapters[lora_id])

    def _read(self, directory: Path) -> dict[str, Matrices]:
        targets = self._slots.targets
        shapes = {name: target.shape for name, target in targets.items()}
        files = read_lora(directory, shapes, self._modules, self._slots.rank)
        return {name: self._own_part(name, a, b, files.config.scale) for name, (a, b) in files.matrices.items()}

    def _own_part(self, name: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> Matrices:
        a, b = a.to(self._dtype), (b.float() * scale).to(self._dtype)
        if not (a.isfinite().all() and b.isfinite().all()):  # they would reach other rows of the batch
            raise LoraError(f"The adapter's matrices of {name} have values that are not finite in {self._dtype}.")
        return self._slots.targets[name].cut(name, a, b)
