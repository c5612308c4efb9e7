"""A worker's memory behind its socket: what arrives, what is said of failures, and who does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from xllm_platform.base import PlatformError

from tests.memory.test_transactions import LAYOUT, Workers, offsets
from tests.support import sleeping_workers
from tests.support.book_driver import fail_nth
from xllm_npu.memory.coordinator import DistributedVirtualMemoryCoordinator, SleepFailed
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.worker_memory import LocalWorkerMemory, MemoryCall
from xllm_npu.memory.worker_memory_rpc import WorkerMemoryRpcClient, WorkerMemoryRpcServer, WorkerMemoryUnreachable
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.messages import KV_CACHE_TAG


class Remote(Workers):
    """Of the two workers the second is behind a socket."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        endpoint = f"ipc://{directory}/memory"
        self.server = WorkerMemoryRpcServer(endpoint, self.resources[1])
        self.client = WorkerMemoryRpcClient(endpoint, 1, lambda: None)
        self.coordinator = DistributedVirtualMemoryCoordinator(
            [LocalWorkerMemory(self.resources[0]), self.client], LAYOUT)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    made = Remote(tmp_path)
    yield made
    made.client.close()
    made.server.close()


def test_pages_are_mapped_there_too(remote):
    remote.coordinator.map(offsets(1, 2))
    remote.check(3)
    remote.coordinator.unmap(offsets(2))
    remote.check(2)
    assert remote.coordinator.growable_pages() > 0


def test_a_refusal_there_is_a_refusal_here(remote):
    remote.drivers[1].outside = remote.drivers[1].memory_info().free
    with pytest.raises(PageGrowthRefused, match=r"Rank 1: .* would leave too little memory") as caught:
        remote.coordinator.map(offsets(1))
    assert caught.value.reason == "memory"
    remote.check(1)


@pytest.mark.parametrize("error", [PlatformError, ValueError])
def test_a_failure_there_is_undone_here(remote, error):
    remote.drivers[1].fault = fail_nth("map", 2, error)
    with pytest.raises(PageGrowthRefused):
        remote.coordinator.map(offsets(1))
    remote.check(1)


def test_rule_45_a_rollback_that_fails_there_is_fatal_here(remote):
    remote.drivers[1].fault = lambda call: PlatformError(call) if call in ("map", "release_page") else None
    with pytest.raises(MemoryOwnershipLost, match="Rank 1"):
        remote.coordinator.map(offsets(1))


def test_rule_45_a_worker_that_does_not_answer_is_fatal(tmp_path):
    """It takes the call and is never heard of again."""
    workers = Workers()
    stuck = threading.Event()

    def hang(call: str) -> None:
        stuck.wait(60)

    endpoint = f"ipc://{tmp_path}/memory"
    server = WorkerMemoryRpcServer(endpoint, workers.resources[1])
    client = WorkerMemoryRpcClient(endpoint, 1, lambda: None, timeout=0.5)
    coordinator = DistributedVirtualMemoryCoordinator([LocalWorkerMemory(workers.resources[0]), client], LAYOUT)
    workers.drivers[1].fault = hang  # type: ignore[assignment]
    with pytest.raises(MemoryOwnershipLost, match="did not answer within"):
        coordinator.map(offsets(1))
    reserved = coordinator.budget.reserved(KV_CACHE_TAG)
    assert reserved == 2 * LAYOUT.num_regions, "the reservation stays with what is unknown"
    stuck.set()
    client.close()
    server.close()


def test_a_process_that_was_killed_is_noticed_while_waiting(tmp_path):
    code = ("import os, sys, zmq\n"
            "socket = zmq.Context().socket(zmq.REP); socket.bind(sys.argv[1]); socket.recv(); os.kill(os.getpid(), 9)")
    process = subprocess.Popen([sys.executable, "-c", code, f"ipc://{tmp_path}/memory"], env=os.environ)

    class Died(Exception):
        pass

    def check() -> None:
        if process.poll() is not None:
            raise Died(f"ended with {process.returncode}")

    client = WorkerMemoryRpcClient(f"ipc://{tmp_path}/memory", 1, check)
    client.start(MemoryCall(verb="prepare", transaction=1, offsets=offsets(1)))
    with pytest.raises(Died, match="-9"):
        client.finish()
    with pytest.raises(WorkerMemoryUnreachable, match="takes no call"):
        client.start(MemoryCall(verb="abort", transaction=1))
    client.close()


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[sleeping_workers.Workers]:
    """Two workers with weights, the second behind a socket."""
    workers = sleeping_workers.Workers()
    endpoint = f"ipc://{tmp_path}/memory"
    server = WorkerMemoryRpcServer(endpoint, workers.resources[1])
    client = WorkerMemoryRpcClient(endpoint, 1, lambda: None)
    workers.coordinator = DistributedVirtualMemoryCoordinator(
        [workers.wires[0], client], workers.layout, has_weights=True)
    yield workers
    client.close()
    server.close()


def test_weights_there_sleep_and_wake_too(sleepers):
    sleepers.coordinator.sleep(1)
    sleepers.check(0, False)
    sleepers.coordinator.wake(["weights"])
    sleepers.coordinator.wake()
    sleepers.check(1, True)
    sleepers.coordinator.sleep(2)
    sleepers.coordinator.wake()
    sleepers.check(1, True)


def test_what_fails_there_leaves_both_as_they_were(sleepers):
    sleepers.models[1].fault = fail_nth("save", 1, MemoryError)
    with pytest.raises(SleepFailed, match="Rank 1: MemoryError"):
        sleepers.coordinator.sleep(1)
    sleepers.check(1, True)
    sleepers.coordinator.sleep(1)
    sleepers.models[1].fault = fail_nth("restore", 1, OSError)
    with pytest.raises(PageGrowthRefused, match="Rank 1: Waking up failed") as caught:
        sleepers.coordinator.wake()
    assert caught.value.reason == "weights"
    sleepers.check(0, False)
    sleepers.coordinator.wake()
    sleepers.check(1, True)


def test_rule_45_a_sleep_that_fails_there_is_fatal_here(sleepers):
    sleepers.drivers[1].fault = fail_nth("release_page", 2)
    with pytest.raises(MemoryOwnershipLost, match="Rank 1"):
        sleepers.coordinator.sleep(1)
