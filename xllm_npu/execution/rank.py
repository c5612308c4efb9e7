"""Where one worker stands: its ranks, its device, and how it meets the others. Derived from what it was told at start.

Data-parallel ranks of a dense model share nothing, so each of them is a world of its own; those of a mixture-of-experts
model hold different experts and form one world.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from xllm_models.config import ModelConfig
from xllm_platform.base import Platform
from xllm_platform.parallel import ExpertExchange, ParallelInit

from xllm_npu.config.settings import Settings
from xllm_npu.memory.device_ledger import DeviceLedger
from xllm_npu.state.launch import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    seed: int  # for requests that give none; the same on all ranks
    dp_rank: int = 0
    tp_rank: int = 0
    slot: Slot = field(default_factory=Slot)
    slots: tuple[Slot, ...] = field(default_factory=lambda: (Slot(),))  # of all ranks
    rendezvous: str = ""  # of all ranks
    own_rendezvous: str = ""  # of this engine's ranks alone; "": made from the other
    ledgers: str = ""  # directory with a ledger for each device of this machine; "": nobody shares it
    checkpoint: str = ""  # directory or hub id of the weights; "": the model's own
    weights: str = ""  # socket at which other processes may have this one's weights; "": nowhere
    weights_from: str = ""  # such a socket of another model's rank, whose weights this one takes; "": none

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine."""
        return sum(s.node == self.slot.node for s in self.slots)

    def open_ledger(self, platform: Platform) -> DeviceLedger | None:
        """That of the selected device. Raises OSError."""
        return DeviceLedger(Path(self.ledgers) / f"device-{platform.device().index or 0}") if self.ledgers else None

    def parallel_init(self, settings: Settings, config: ModelConfig) -> ParallelInit:
        p, timeout = settings.parallel, settings.distributed.collective_timeout
        coupled = is_coupled(settings, config)
        dp_size = p.dp_size if coupled else 1
        return ParallelInit(
            rank=(self.dp_rank if coupled else 0) * p.tp_size + self.tp_rank, world_size=dp_size * p.tp_size,
            init_method=self.rendezvous if coupled else self.own_rendezvous or f"{self.rendezvous}{_own(self)}",
            tp_size=p.tp_size, dp_size=dp_size, ep_size=p.expert_ranks, timeout_seconds=timeout + 60,
            experts=ExpertExchange(
                all_to_all=p.expert_parallel_degree == 2, balanced=p.enable_eplb,
                redundant=p.redundant_experts_num if p.enable_eplb else 0,
            ),
        )


def of_rank(path: str, tp_rank: int) -> str:
    """One rank's socket, of those of an engine; "" stays so."""
    return f"{path}-{tp_rank}" if path else ""


def _own(rank: Rank) -> str:
    """Worlds that share a rendezvous file would mix."""
    return f"-{rank.dp_rank}" if rank.rendezvous.startswith("file://") else ""


def is_coupled(settings: Settings, config: ModelConfig) -> bool:
    """Do the data-parallel ranks run every step together?"""
    return settings.parallel.dp_size > 1 and getattr(config, "moe", None) is not None
