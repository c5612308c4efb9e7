"""A server on several machines, seen from its HTTP process: gather the machines once, plan the engines each time.

`plan` may be called again when what the last one started has been killed: the machines stay joined, and one that was
lost may come back. Knows what to start, not what it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from xllm_npu.config.address import Address
from xllm_npu.config.settings import Settings
from xllm_npu.execution.device_probe import probe
from xllm_npu.master.cluster.cluster_master import ClusterError, ClusterMaster
from xllm_npu.master.cluster.cluster_plan import EngineOrder, order_engines, ports_needed
from xllm_npu.master.cluster.engine_launcher import EngineLauncher, FarWorker
from xllm_npu.master.cluster.identity import identify
from xllm_npu.master.cluster.layout import Offer, place_ranks
from xllm_npu.master.cluster.network import collective_environment, free_ports
from xllm_npu.master.cluster.node import Node
from xllm_npu.master.cluster.ray_driver import with_distributed
from xllm_npu.master.cluster.ray_placement import RayPlacement
from xllm_npu.master.engine_plan import EnginePlan
from xllm_npu.master.launcher import LocalLauncher
from xllm_npu.state.launch import Slot
from xllm_npu.state.messages import EngineProgress

log = logging.getLogger(__name__)

STAGE = "Waiting for the other machines"
IDLE_SECONDS = 10.0  # for processes that were killed to be gone


class Cluster:
    """`on_failure` hears, in a sentence, of the end of a machine or of a process that nobody else watches."""

    def __init__(self, settings: Settings, on_failure: Callable[[str], None],
                 on_progress: Callable[[EngineProgress], None]) -> None:
        self._settings = settings
        self._tell, self._on_progress = on_failure, on_progress
        self._closing = False
        self._ray: RayPlacement | None = None
        self._master: ClusterMaster | None = None
        self._own: list[Offer] = []  # what this machine lends
        self._nodes: list[Node] = []
        self._slots: list[Slot] = []

    async def plan(self, directory: Path, checkpoint: str = "") -> list[EnginePlan]:
        """One plan a data-parallel rank; `checkpoint` as in `plan_on_one_machine`.

        Raises ClusterError, LayoutError, AddressError, ProbeError, OSError.
        """
        await self._old_ones_gone()
        master = await self._gather()
        p, seed = self._settings.parallel, self._settings.execution.random_seed
        ports, addresses = dict[int, list[int]](), {0: master.address}
        for rank, count in ports_needed(self._slots, p.tp_size).items():
            ports[rank] = master.find_ports(count) if rank == 0 else await self._node(rank).find_ports(count)
        addresses.update((node.rank, node.address) for node in self._nodes)
        orders = order_engines(self._settings, self._slots, addresses, ports, str(directory),
                               time.time_ns() if seed < 0 else seed, checkpoint)
        return [EnginePlan(self._launcher(order), order.init) for order in orders]

    async def _old_ones_gone(self) -> None:
        for node in self._nodes:
            try:
                await asyncio.wait_for(node.wait_idle(), IDLE_SECONDS)
            except TimeoutError:
                raise ClusterError(f"Processes that were killed on {node} are still there.") from None

    async def close(self, failure: str = "") -> None:
        """The other machines end, with everything they run."""
        self._closing = True
        if self._master is not None:
            await self._master.close(failure)
        if self._ray is not None:
            await self._ray.close()

    def _on_failure(self, sentence: str) -> None:
        if not self._closing:
            self._tell(sentence)

    async def _gather(self) -> ClusterMaster:
        parallel = self._settings.parallel
        if self._master is None:
            await (self._join_ray() if self._settings.distributed.placement == "ray" else self._open())
        master = self._master
        assert master is not None
        self._nodes = await master.gather(lambda joined, of: self._on_progress(EngineProgress(STAGE, joined, of)))
        offers = [*self._own, *(Offer(node.rank, tuple(node.identity.devices), node.identity.shares_devices)
                                for node in self._nodes)]
        self._slots = place_ranks(offers, parallel.tp_size, parallel.dp_size)
        for offer in offers:
            ranks = [rank for rank, slot in enumerate(self._slots) if slot.node == offer.node]
            log.info("node %d has rank%s %s", offer.node, "s" * (len(ranks) != 1), ", ".join(map(str, ranks)) or "-")
        # What this process starts talks to the others over the same network.
        for name, value in collective_environment(master.address).items():
            os.environ.setdefault(name, value)
        return master

    async def _open(self) -> None:
        """Wait for machines where one of our commands runs, like this one."""
        devices = await asyncio.get_running_loop().run_in_executor(None, probe, self._settings.execution.platform)
        own = identify(self._settings, devices)
        expected = range(1, self._settings.distributed.nnodes)
        self._own = [Offer(0, tuple(own.devices), own.shares_devices)]
        self._listen(ClusterMaster(self._settings, own, expected, self._on_failure))

    async def _join_ray(self) -> None:
        """Have Ray start agents. This process may be on a machine without a device: it holds no rank."""
        self._ray = RayPlacement(self._settings, self._on_failure)
        found = await self._ray.connect()
        d, count = self._settings.distributed, self._settings.parallel.tp_size * self._settings.parallel.dp_size
        address = d.master_node_addr
        if "master_node_addr" not in d.model_fields_set:
            address = str(Address(found.address, free_ports(found.address, 1)[0]))
        settings = with_distributed(self._settings, master_node_addr=address, node_addr=d.node_addr or found.address)
        self._listen(ClusterMaster(settings, None, range(1, count + 1), self._on_failure))
        self._on_progress(EngineProgress("Placing actors in the Ray cluster", 0, 1))
        await self._ray.place(address, count)

    def _listen(self, master: ClusterMaster) -> None:
        master.open()
        self._master = master

    def _node(self, rank: int) -> Node:
        return next(node for node in self._nodes if node.rank == rank)

    def _launcher(self, order: EngineOrder) -> EngineLauncher:
        launcher = LocalLauncher() if order.init.node == 0 else self._node(order.init.node)
        tp_size = self._settings.parallel.tp_size
        far = [FarWorker(init.dp_rank * tp_size + init.tp_rank, self._node(init.slot.node), init) for init in order.far]
        return EngineLauncher(launcher, far, self._on_failure)
