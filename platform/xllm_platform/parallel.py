"""Which ranks work together: world, tensor, data and expert parallel groups of one process.

Ranks are laid out with tensor parallel ranks next to each other: rank = dp_rank * tp_size + tp_rank.
Mixture-of-experts layers cut the same world differently: rank = ep_rank * moe_tp_size + moe_tp_rank, where
moe_tp_size = world / ep_size ranks share one expert's matrices. `ParallelState.single()` needs no
torch.distributed. Does not start processes, does not choose devices, does not know models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from xllm_platform.base import PlatformError

if TYPE_CHECKING:
    import torch.distributed as dist

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate. `rank` is this process's index among them; `handle` is None for a group of
    one."""

    ranks: tuple[int, ...] = (0,)  # world ranks, in group order
    rank: int = 0
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """How tokens reach the experts of other ranks; the same on every rank."""

    all_to_all: bool = False  # rows go to their experts' ranks; else every rank sees all rows
    balanced: bool = False  # experts move between ranks by how busy they are
    redundant: int = 0  # spare places a rank, for copies of busy experts


@dataclass(frozen=True, slots=True)
class ParallelInit:
    """What a worker process is told when it starts."""

    rank: int
    world_size: int
    init_method: str  # "tcp://host:port" of rank 0, or "file:///path" on one machine
    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    timeout_seconds: float = 300.0
    experts: ExpertExchange = ExpertExchange()

    def check(self) -> None:
        """Raise PlatformError, naming the sizes, if they do not fit together."""
        if min(self.tp_size, self.dp_size, self.ep_size, self.world_size) < 1:
            raise PlatformError("tp_size, dp_size, ep_size and world_size must be at least 1.")
        if self.tp_size * self.dp_size != self.world_size:
            raise PlatformError(
                f"tp_size * dp_size must be the number of devices: {self.tp_size} * {self.dp_size} "
                f"is not {self.world_size}."
            )
        if self.world_size % self.ep_size:
            raise PlatformError(
                f"ep_size must divide the number of devices, {self.world_size}; got {self.ep_size}."
            )
        if not 0 <= self.rank < self.world_size:
            raise PlatformError(f"rank must be in 0..{self.world_size - 1}, got {self.rank}.")


@dataclass(frozen=True, slots=True)
class ParallelState:
    """This process's groups. Ask a group for size and rank; pass it to `xllm_platform.collectives`."""

    world: Group
    tp: Group  # shares one copy of the model's matrices
    dp: Group  # same part of the matrices, other requests
    ep: Group  # same part of an expert's matrices, other experts
    moe_tp: Group  # shares the matrices of one set of experts
    experts: ExpertExchange = ExpertExchange()

    @classmethod
    def single(cls) -> ParallelState:
        """One process that has the whole model."""
        one = Group()
        return cls(world=one, tp=one, dp=one, ep=one, moe_tp=one)

    @classmethod
    def initialize(cls, init: ParallelInit, backend: str) -> ParallelState:
        """Join the other ranks (blocks until all have come). `backend` is the platform's
        `collective_backend`.

        The platform's device has to be selected before. Raises PlatformError if sizes do not fit or ranks do
        not come.
        """
        init.check()
        if init.world_size == 1:
            return cls.single()
        import torch.distributed as dist

        timeout = timedelta(seconds=init.timeout_seconds)
        one_machine = backend == "gloo" and init.init_method.startswith("file://")
        with _loopback() if one_machine else nullcontext():
            try:
                dist.init_process_group(
                    backend,
                    init_method=init.init_method,
                    rank=init.rank,
                    world_size=init.world_size,
                    timeout=timeout,
                )
            except (dist.DistError, RuntimeError, ValueError) as error:
                raise PlatformError(
                    f"rank {init.rank} of {init.world_size} could not join the others at "
                    f"{init.init_method} with {backend}: {error}"
                ) from error
            groups = {name: _join(init, parts, dist, timeout) for name, parts in partitions(init).items()}
        return cls(**groups, experts=init.experts)

    def shutdown(self) -> None:
        """Leave the groups. Harmless for `single()` and when called twice."""
        if self.world.size == 1:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _loopback() -> Iterator[None]:
    """gloo meets on the loopback interface, whatever the machine's name resolves to, unless the user says otherwise."""
    if _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]  # children of this process may be of another world


def partitions(init: ParallelInit) -> dict[str, list[tuple[int, ...]]]:
    """For each kind of group, how it divides the world's ranks; the same on every rank."""
    world = range(init.world_size)
    moe_tp = init.world_size // init.ep_size
    return {
        "world": [tuple(world)],
        "tp": [tuple(world[i : i + init.tp_size]) for i in range(0, init.world_size, init.tp_size)],
        "dp": [tuple(world[i :: init.tp_size]) for i in range(init.tp_size)],
        "ep": [tuple(world[i::moe_tp]) for i in range(moe_tp)],
        "moe_tp": [tuple(world[i : i + moe_tp]) for i in range(0, init.world_size, moe_tp)],
    }


def _join(init: ParallelInit, parts: list[tuple[int, ...]], dist: Any, timeout: timedelta) -> Group:
    """This rank's group. Every rank creates every group in the same order, as torch.distributed demands."""
    mine = Group()
    for ranks in parts:
        handle = None
        if len(ranks) == init.world_size:
            handle = dist.group.WORLD
        elif len(ranks) > 1:
            handle = dist.new_group(list(ranks), timeout=timeout)
        if init.rank in ranks:
            mine = Group(ranks, ranks.index(init.rank), handle)
    return mine
