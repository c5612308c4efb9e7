"""What a process is told when it starts: where it stands among the ranks and whom it talks to.

One JSON line on the standard input of each child, which then stays open for as long as the parent lives. World rank =
dp_rank * tp_size + tp_rank. Knows neither torch nor how processes are started.
"""

from __future__ import annotations

import msgspec


class Slot(msgspec.Struct, frozen=True):
    """Where one rank lives."""

    node: int = 0  # which machine
    device: int = -1  # the device's index on that machine; -1: the platform's default


def local_slots(count: int, first_device: int = 0) -> list[Slot]:
    """`count` ranks on this machine, on devices that follow each other."""
    return [Slot(0, first_device + i) for i in range(count)]


class EngineInit(msgspec.Struct, kw_only=True):
    """For an engine process: one data-parallel rank, with worker tp_rank 0 inside."""

    settings: str  # Settings as JSON, without what is unset
    requests: str  # ZeroMQ endpoint that the engine pulls ClientMessages from
    outputs: str  # and the one it pushes EngineMessages to
    directory: str  # private to this server on this machine; the engine removes it when its parent has died
    seed: int  # for requests without one; the same on all ranks
    dp_rank: int = 0
    node: int = 0  # the machine this engine runs on
    slots: list[Slot] = msgspec.field(default_factory=lambda: [Slot()])  # [dp_size * tp_size], by world rank
    rendezvous: str = ""  # torch.distributed init_method of the world; "": the engine makes a file for its own ranks
    own_rendezvous: str = ""  # that of this engine's ranks alone, where data-parallel ranks share nothing; "": as above
    agreement: str = ""  # data-parallel ranks that step together: endpoint where rank 0 binds and the others connect
    steps: str = ""  # endpoint "tcp://address:port" to bind for workers on other machines; "": all are on this one
    reports: str = ""  # likewise, for what they say
    memory_master: str = ""  # endpoint to bind, where ranks on several machines register their memory; "": one machine
    memory_master_at: str = ""  # how they reach it
    memory_token: str = ""  # that they name there
    ledgers: str = ""  # directory with the ledger of each device of this machine, for all models; "": `directory`
    checkpoint: str = ""  # directory or hub id to load the weights from; "": the model's own
    weights: str = ""  # path for sockets at which its ranks share weights, "-" and tp_rank to come; "": they do not
    weights_from: str = ""  # that of the engine whose weights this one shares; "": it loads its own


class RingPlace(msgspec.Struct, kw_only=True):
    """One reader of an engine's ring; the descriptors are inherited."""

    fd: int
    bell: int
    index: int


class WorkerInit(msgspec.Struct, kw_only=True):
    """For a worker process: one device."""

    settings: str
    steps: str  # endpoint that StepInputs come from
    reports: str  # endpoint that WorkerReports go to
    seed: int
    dp_rank: int
    tp_rank: int
    slot: Slot
    rendezvous: str
    world: list[Slot]
    own_rendezvous: str = ""
    memory: str = ""  # endpoint to bind for calls about memory, where it is virtual; TCP with port * takes a free one
    memory_master: str = ""  # endpoint to register it at; "": it is said with readiness
    memory_token: str = ""
    ledgers: str = ""  # as in EngineInit
    checkpoint: str = ""
    weights: str = ""  # as in EngineInit, with the rank
    weights_from: str = ""
    directory: str = ""  # of its parent, where that is not its engine: goes with it
    ring: RingPlace | None = None  # shared memory that steps come through; None: they come by `steps`
