"""Rules 11 to 13: where rank 0 hears at which endpoints the other ranks' memory takes calls."""

from __future__ import annotations

import pytest
import zmq

from tests.memory.test_transactions import LAYOUT, Workers, offsets
from xllm_npu.master.cluster.network import free_ports
from xllm_npu.memory.worker_memory import MemoryCall
from xllm_npu.memory.worker_memory_registry import (
    Registration,
    RegistrationFailed,
    WorkerMemoryRegistry,
    register,
)
from xllm_npu.memory.worker_memory_rpc import WorkerMemoryRpcClient, WorkerMemoryRpcServer


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]"])
def test_rule_12_a_worker_registers_and_rank_0_connects_back(endpoint, host):
    workers = Workers()
    registry = WorkerMemoryRegistry(endpoint, "secret")
    server = WorkerMemoryRpcServer(f"tcp://{host}:*", workers.resources[0])
    assert server.endpoint.startswith(f"tcp://{host}:")
    register(endpoint, Registration(token="secret", rank=3, endpoint=server.endpoint))
    client = WorkerMemoryRpcClient(registry.endpoint_of(3), 3, lambda: None)
    registry.close()
    for call in (MemoryCall(verb="prepare", transaction=9, offsets=offsets(1)),
                 MemoryCall(verb="commit", transaction=9)):
        client.start(call)
        assert client.finish() == 0
    assert workers.pages_mapped() == [2, 1]
    client.start(MemoryCall(verb="growable"))
    assert client.finish() <= LAYOUT.num_pages * 100
    client.close()
    server.close()


def test_another_engines_rank_and_nonsense_are_refused(endpoint):
    registry = WorkerMemoryRegistry(endpoint, "secret")
    with pytest.raises(RegistrationFailed, match="another engine"):
        register(endpoint, Registration(token="other", rank=1, endpoint="tcp://x:1"))
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(endpoint)
        socket.send(b"\xc1 nonsense")
        assert socket.recv()
    register(endpoint, Registration(token="secret", rank=1, endpoint="tcp://x:2"))
    assert registry.endpoint_of(1) == "tcp://x:2"
    registry.close()


def test_nobody_there_and_an_address_in_use_name_the_setting(endpoint):
    with pytest.raises(RegistrationFailed, match="--worker-memory-master-node-addr"):
        register(endpoint, Registration(token="", rank=1, endpoint=""), timeout=0.05)
    registry = WorkerMemoryRegistry(endpoint, "")
    with pytest.raises(RegistrationFailed, match="Choose another --worker-memory-master-node-addr"):
        WorkerMemoryRegistry(endpoint, "")
    registry.close()
