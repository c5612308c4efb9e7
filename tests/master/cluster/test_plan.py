"""Who is told what: every endpoint lies on the machine that will listen there, and no port is used twice."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_npu.config.settings import Settings
from xllm_npu.master.cluster.cluster_plan import EngineOrder, order_engines, ports_needed
from xllm_npu.state.launch import Slot


def orders(
    nodes: list[int], tp_size: int, checkpoint: str = "", **sections
) -> tuple[list[EngineOrder], dict[int, str]]:
    """For ranks that lie on `nodes`; addresses are 10.0.0.<node>, or IPv6 for odd ones."""
    settings = Settings(parallel={"tp_size": tp_size, "dp_size": len(nodes) // tp_size}, **sections)
    slots = [Slot(node, rank) for rank, node in enumerate(nodes)]
    addresses = {node: f"fd00::{node}" if node % 2 else f"10.0.0.{node}" for node in {0, *nodes}}
    numbers = count(1000)
    ports = {node: [next(numbers) for _ in range(needed)] for node, needed in ports_needed(slots, tp_size).items()}
    return order_engines(settings, slots, addresses, ports, "/private", 7, checkpoint), addresses


def at(addresses: dict[int, str], node: int) -> str:
    return f"tcp://[{addresses[node]}]:" if node % 2 else f"tcp://{addresses[node]}:"


def test_tensor_parallel_over_two_machines():
    (order,), addresses = orders([0, 1], 2, "new")
    init, (worker,) = order.init, order.far
    assert init.checkpoint == worker.checkpoint == "new"
    assert init.requests == "ipc:///private/requests-0"
    assert init.steps.startswith(at(addresses, 0))
    assert (worker.steps, worker.reports, worker.slot.node) == (init.steps, init.reports, 1)
    assert (worker.tp_rank, worker.dp_rank, worker.seed) == (1, 0, 7)
    assert worker.own_rendezvous == init.own_rendezvous
    assert init.agreement == ""


def test_data_parallel_over_two_machines():
    (near, far), addresses = orders([0, 0, 1, 1], 2)
    assert near.far == far.far == []
    assert near.init.steps == far.init.steps == ""
    assert far.init.requests.startswith(at(addresses, 0))  # where the HTTP process is
    assert far.init.own_rendezvous.startswith(at(addresses, 1))
    assert near.init.agreement == far.init.agreement
    assert near.init.rendezvous == far.init.rendezvous
    assert near.init.own_rendezvous != far.init.own_rendezvous


def test_a_first_machine_without_ranks():
    (order,), addresses = orders([1, 2], 2)
    assert order.init.node == 1
    assert order.init.outputs.startswith(at(addresses, 0))
    assert order.init.rendezvous.startswith(at(addresses, 1))


VMM = {"kv_cache": {"enable_vmm_kvcache": True}}


def test_rules_11_to_13_ranks_register_their_memory_at_rank_0_and_nowhere_else():
    (order,), addresses = orders([0, 1], 2, **VMM)
    init, (worker,) = order.init, order.far
    assert init.memory_master == init.memory_master_at == worker.memory_master
    assert init.memory_master.startswith(at(addresses, 0))
    assert worker.memory == at(addresses, 1) + "*"
    assert worker.memory_token == init.memory_token != ""
    (without,), _ = orders([0, 1], 2)
    assert (without.init.memory_master, without.far[0].memory_master) == ("", "")


def test_where_ranks_register_their_memory_can_be_said():
    given = {"distributed": {"worker_memory_master_node_addr": "127.0.0.1:700"}}
    made, addresses = orders([0, 1, 0, 1, 1, 0], 2, **VMM, **given)
    assert [order.init.memory_master for order in made] == [
        "tcp://127.0.0.1:700", "tcp://127.0.0.1:701", at(addresses, 1) + "702"]
    (far,), _ = orders([0, 1], 2, **VMM, distributed={"worker_memory_master_node_addr": "203.0.113.9:700"})
    assert (far.init.memory_master, far.init.memory_master_at) == ("tcp://*:700", "tcp://203.0.113.9:700")


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1))
def test_no_port_twice_and_all_where_they_listen(tp_size, dp_size, per_node, first):
    nodes = [first + rank // per_node for rank in range(tp_size * dp_size)]
    made, addresses = orders(nodes, tp_size, **VMM)
    listening = Counter[str]()
    for order in made:
        init = order.init
        own = nodes[init.dp_rank * tp_size]
        assert init.node == own
        for endpoint, node in ((init.requests, 0), (init.outputs, 0), (init.steps, own), (init.reports, own),
                               (init.own_rendezvous, own), (init.memory_master, own)):
            if endpoint.startswith("tcp"):
                assert endpoint.startswith(at(addresses, node))
                listening[endpoint] += 1
        assert {w.slot.node for w in order.far} == set(nodes[init.dp_rank * tp_size:][:tp_size]) - {own}
        assert bool(init.steps) == bool(order.far)
    listening.update({made[0].init.rendezvous, made[0].init.agreement} - {""})
    assert max(listening.values()) == 1


def test_ports_of_unknown_machines_are_not_taken():
    with pytest.raises(KeyError):
        order_engines(Settings(), [Slot(3, 0)], {0: "10.0.0.1"}, {}, "/private", 7)
