"""Agents and a master in one event loop, on loopback addresses, with dummies for the processes they start."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from xllm_npu.config.settings import Settings
from xllm_npu.master.cluster.agent import NodeAgent
from xllm_npu.master.cluster.cluster_master import ClusterMaster
from xllm_npu.master.cluster.messages import Identity
from xllm_npu.master.cluster.network import free_ports
from xllm_npu.state.launch import EngineInit, Slot, WorkerInit
from xllm_npu.version import __version__

# Says its line's length and then follows its standard input, as our processes do.
FOLLOWER = "import sys; print(len(sys.stdin.readline()), file=sys.stderr, flush=True); sys.stdin.read()"
IDENTITY = Identity(version=__version__, torch="2", platform="cpu", devices=[0], shares_devices=True, nnodes=2,
                    model="m", settings={"block_size": "16"})
DEADLINE = 20.0


def dummy(code: str = FOLLOWER) -> dict[str, list[str]]:
    return {entry: [sys.executable, "-c", code] for entry in ("engine", "worker")}


def free_address() -> str:
    return f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"


def settings_of(address: str, rank: int, **distributed: Any) -> Settings:
    values = {"nnodes": 2, "node_rank": rank, "master_node_addr": address, "node_join_timeout": 10, **distributed}
    return Settings(distributed=values)  # type: ignore[arg-type]


def worker_line(**fields: Any) -> bytes:
    values = {"settings": "{}", "steps": "tcp://127.0.0.1:1", "reports": "tcp://127.0.0.1:2", "seed": 0, "dp_rank": 0,
              "tp_rank": 1, "slot": Slot(1, 0), "rendezvous": "tcp://127.0.0.1:3", "world": [Slot(0, 0), Slot(1, 0)]}
    return msgspec.json.encode(WorkerInit(**{**values, **fields}))


def engine_line(**fields: Any) -> bytes:
    values = {"settings": "{}", "requests": "r", "outputs": "o", "directory": "/somewhere/else", "seed": 0}
    return msgspec.json.encode(EngineInit(**{**values, **fields}))


class Machines:
    """A master and what it hears; agents are added as they start."""

    def __init__(self, **distributed: Any) -> None:
        self.address = free_address()
        self.distributed = distributed
        self.failures: list[str] = []
        self.failed = asyncio.Event()
        self.agents: list[asyncio.Task[str | None]] = []

    def on_failure(self, sentence: str) -> None:
        self.failures.append(sentence)
        self.failed.set()

    def open_master(self, identity: Identity | None = IDENTITY, expected: tuple[int, ...] = (1,)) -> ClusterMaster:
        self.master = ClusterMaster(settings_of(self.address, 0, **self.distributed), identity, expected,
                                    self.on_failure)
        self.master.open()
        return self.master

    def agent(self, rank: int = 1, identity: Identity = IDENTITY, code: str = FOLLOWER,
              **distributed: Any) -> tuple[NodeAgent, "asyncio.Task[str | None]"]:
        settings = settings_of(self.address, rank, node_addr=f"127.0.0.{rank + 1}",
                               **{**self.distributed, **distributed})
        agent = NodeAgent(settings, identity, dummy(code))
        task = asyncio.create_task(agent.run())
        self.agents.append(task)
        return agent, task


@asynccontextmanager
async def machines(**distributed: Any) -> AsyncIterator[Machines]:
    made = Machines(**distributed)
    try:
        yield made
    finally:
        if hasattr(made, "master"):
            await made.master.close()
        done = await asyncio.wait_for(asyncio.gather(*made.agents, return_exceptions=True), DEADLINE)
        assert not [error for error in done if isinstance(error, BaseException)]


async def until(question: Callable[[], object], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE
    while not question():
        assert asyncio.get_running_loop().time() < deadline, f"waited {DEADLINE:g} s for {what}"
        await asyncio.sleep(0.01)
