"""From slots to what every engine and worker is told: who listens where, with ports of the machine that will listen.

Every endpoint is the address of one machine and a port that it has found free; what stays on one machine uses a file
there. Starts nothing.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from xllm_npu.config.address import EVERY_INTERFACE, parse_address
from xllm_npu.config.parallel import MEMORY_MASTER
from xllm_npu.config.settings import Settings
from xllm_npu.master.cluster.network import endpoint, listening_address
from xllm_npu.state.launch import EngineInit, Slot, WorkerInit

Ports = Mapping[int, list[int]]  # node -> ports, used up from the end


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """One engine, on machine `init.node`, and those of its workers that it does not start itself."""

    init: EngineInit
    far: list[WorkerInit]  # on machine `slot.node` each


def ports_needed(slots: list[Slot], tp_size: int) -> Counter[int]:
    """Node -> how many ports it has to find, node 0 being where the HTTP process runs."""
    needed: Counter[int] = Counter()
    for first in range(0, len(slots), tp_size):
        engine = slots[first].node
        needed[0] += 2  # requests and outputs
        needed[engine] += 4  # its own rendezvous, steps, reports and registrations of memory
    needed[slots[0].node] += 2  # the world's rendezvous and the agreement
    return needed


def order_engines(settings: Settings, slots: list[Slot], addresses: Mapping[int, str], ports: Ports, directory: str,
                  seed: int, checkpoint: str = "") -> list[EngineOrder]:
    """One order a data-parallel rank. `directory` is the HTTP process's own, for engines on its machine."""
    tp_size, dp_size = settings.parallel.tp_size, settings.parallel.dp_size

    def take(node: int) -> str:
        return endpoint(addresses[node], ports[node].pop())

    first = slots[0].node
    text = settings.model_dump_json(exclude_unset=True)
    rendezvous, agreement = take(first), take(first) if dp_size > 1 else ""
    orders = []
    for rank in range(dp_size):
        own = slots[rank * tp_size : (rank + 1) * tp_size]
        node = own[0].node
        far = any(slot.node != node for slot in own)
        master, master_at = _memory_master(settings, rank, node, addresses, partial(take, node))
        token = secrets.token_hex(8)
        init = EngineInit(
            settings=text, directory=directory, seed=seed, dp_rank=rank, node=node, slots=slots,
            requests=f"ipc://{directory}/requests-{rank}" if node == 0 else take(0),
            outputs=f"ipc://{directory}/outputs-{rank}" if node == 0 else take(0),
            rendezvous=rendezvous, own_rendezvous=take(node), agreement=agreement,
            steps=take(node) if far else "", reports=take(node) if far else "",
            memory_master=master, memory_master_at=master_at, memory_token=token, checkpoint=checkpoint,
        )
        orders.append(EngineOrder(init, [
            WorkerInit(settings=text, steps=init.steps, reports=init.reports, seed=seed, dp_rank=rank, tp_rank=tp_rank,
                       slot=slot, rendezvous=rendezvous, own_rendezvous=init.own_rendezvous, world=slots,
                       memory=endpoint(addresses[slot.node], "*"), memory_master=master_at, memory_token=token,
                       checkpoint=checkpoint)
            for tp_rank, slot in enumerate(own) if slot.node != node
        ]))
    return orders


def _memory_master(settings: Settings, dp_rank: int, node: int, addresses: Mapping[int, str],
                   take: Callable[[], str]) -> tuple[str, str]:
    """Where an engine's ranks register their virtual memory: (endpoint to bind, endpoint to connect to).

    As it was set, if it was; an engine that is not on the HTTP process's machine uses that of its own, at such a port.
    """
    kv, given = settings.kv_cache, settings.distributed.worker_memory_master_node_addr
    if settings.parallel.tp_size == 1 or not (kv.enable_vmm_kvcache or kv.enable_vmm_weights):
        return "", ""
    if given == MEMORY_MASTER:
        free = take()
        return free, free
    host, port = parse_address(given)
    port += dp_rank
    if node or host in EVERY_INTERFACE:
        own = endpoint(addresses[node], port)
        return own, own
    return endpoint(listening_address(host) or "*", port), endpoint(host, port)
