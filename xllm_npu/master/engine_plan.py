"""Which engine processes a server is made of, who starts each, and what it is told: here for one machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from xllm_npu.config.settings import Settings
from xllm_npu.master.launcher import Launcher, LocalLauncher
from xllm_npu.state.launch import EngineInit, local_slots


@dataclass(slots=True, frozen=True)
class EnginePlan:
    launcher: Launcher
    init: EngineInit


def plan_on_one_machine(
    settings: Settings, directory: Path, ledgers: Path | None = None, weights_from: Path | None = None,
    checkpoint: str = "",
) -> list[EnginePlan]:
    """One engine a data-parallel rank, with sockets in `directory`.

    `ledgers`: the directory, made by engines, that all models of the server keep the ledgers of their devices in.
    `weights_from`: that of a model with the same settings, whose weights these engines share. `checkpoint`: where they
    load them from, if not from the model's.
    """
    tp_size, dp_size = settings.parallel.tp_size, settings.parallel.dp_size
    seed = settings.execution.random_seed
    seed = time.time_ns() if seed < 0 else seed
    slots = local_slots(tp_size * dp_size, max(settings.execution.device_id, 0))
    launcher = LocalLauncher()
    text = settings.model_dump_json(exclude_unset=True)
    return [
        EnginePlan(launcher, EngineInit(
            settings=text, requests=f"ipc://{directory}/requests-{rank}", outputs=f"ipc://{directory}/outputs-{rank}",
            directory=str(directory), checkpoint=checkpoint, seed=seed, dp_rank=rank, slots=slots,
            rendezvous=f"file://{directory}/rendezvous",
            agreement=f"ipc://{directory}/agreement" if dp_size > 1 else "", ledgers=str(ledgers or ""),
            weights=f"{directory}/weights-{rank}" if settings.kv_cache.enable_vmm_weights else "",
            weights_from=f"{weights_from}/weights-{rank}" if weights_from is not None else "",
        ))
        for rank in range(dp_size)
    ]
