"""Weights in the same pages for two models: who has them, who counts for them, what is left when one ends or sleeps.

Both ends are in this process, over two drivers of real pages, except where one is to be killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from xllm_models.weight_memory import WeightLayout
from xllm_platform.base import AllocatorStats, MemoryInfo, PlatformError
from xllm_platform.cpu.virtual_memory import MemfdVirtualMemory

from xllm_npu.memory.device_ledger import DeviceLedger
from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.memory.weight_contents import SleepOptions
from xllm_npu.memory.weight_export import BATCH, WeightExporter
from xllm_npu.memory.weight_import import WeightImporter, WeightsUnavailable
from xllm_npu.memory.weight_regions import WeightRegion
from xllm_npu.memory.worker_residency import WorkerResidency
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.messages import KV_CACHE_TAG, WEIGHTS_TAG

PAGE = 4096
NUM_PAGES = BATCH + 3
LENGTH = NUM_PAGES * PAGE // 4  # int32
WEIGHT_BYTES = NUM_PAGES * PAGE


def layout(length: int = LENGTH) -> WeightLayout:
    planned = WeightLayout()
    planned.place((length,), torch.int32)
    return planned


class Worker:
    """One model's memory: weights that are 0, 1, 2, ..., and no KV cache."""

    def __init__(self, directory: Path, weights_from: str = "", length: int = LENGTH, elastic: bool = True) -> None:
        self.ledger = DeviceLedger(directory / "device-0")
        growth = GrowthRule(GrowthLimits(total_bytes=1 << 40), lambda: MemoryInfo(1 << 40, 1 << 40),
                            lambda: AllocatorStats(reserved=1, peak_reserved=1), 1, self.ledger)
        self.driver = MemfdVirtualMemory(lambda: 1 << 40)
        self.memory = WorkerMemoryResources(self.driver, None, growth if elastic else None, lambda: None,
                                            page_bytes=PAGE, ledger=self.ledger)
        importer = WeightImporter(weights_from, self.memory.pool) if weights_from else None
        self.region: WeightRegion = self.memory.open_weights(layout(length), importer)
        self.weights = self.region.empty((length,), torch.int32, torch.device("cpu"))
        self.loads = 0
        if not weights_from:
            self.load()
        self.residency = self.memory.residency = WorkerResidency(self.memory, SleepOptions(
            loader=self, host_copy=False, pinned=False, empty_cache=lambda: None))
        self._transactions = 0

    def check(self) -> None:
        pass

    def load(self) -> None:
        self.loads += 1
        self.weights.copy_(torch.arange(len(self.weights)))

    def export(self, path: str) -> None:
        self.memory.exporter = WeightExporter(path, self.memory, "descriptor")

    def sleep(self, level: int = 1) -> int:
        self._transactions += 1
        self.residency.prepare_sleep(self._transactions, level)
        return self.residency.commit_sleep(self._transactions)

    def wake(self) -> None:
        self._transactions += 1
        self.residency.prepare_wake(self._transactions, (WEIGHTS_TAG, KV_CACHE_TAG))
        self.residency.commit_wake(self._transactions)
        self.residency.finish_wake(self._transactions)

    @property
    def is_right(self) -> bool:
        return bool(torch.equal(self.weights, torch.arange(len(self.weights), dtype=torch.int32)))


@contextmanager
def family(directory: Path, forks: int = 1, **options) -> Iterator[list[Worker]]:
    """A parent and its forks; each is closed unless the test did."""
    path = str(directory / "weights")
    with ExitStack() as stack:
        workers: list[Worker] = []
        for i in range(1 + forks):
            worker = Worker(directory, path if i else "", **options)
            workers.append(worker)
            stack.callback(lambda worker=worker: worker.ledger._file < 0 or worker.memory.close())
            if not i:
                worker.export(path)
        yield workers


def until(question: Callable[[], bool], what: str) -> None:
    """The exporter hears of an end in a thread of its own."""
    deadline = time.monotonic() + 20
    while not question():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.005)


def resident(worker: Worker) -> int:
    return os.stat(f"/proc/self/fd/{worker.driver._file}").st_blocks * 512


@pytest.mark.parametrize("elastic", [True, False])
def test_forks_take_no_pages_of_their_own(tmp_path, elastic):
    with family(tmp_path, forks=2, elastic=elastic) as (parent, *forks):
        for fork in forks:
            assert fork.is_right
            assert (resident(fork), fork.memory.committed_bytes, fork.ledger.reserved) == (0, 0, 0)
        assert parent.ledger.total == WEIGHT_BYTES, "each page counts once"
        for worker in (parent, *forks):
            worker.memory.check_integrity()


@pytest.mark.parametrize("first", ["parent", "fork"])
def test_whoever_ends_first_the_other_keeps_its_weights_and_counts_for_them(tmp_path, first):
    with family(tmp_path) as (parent, fork):
        observer = DeviceLedger(tmp_path / "device-0")
        ends, stays = (parent, fork) if first == "parent" else (fork, parent)
        ends.memory.close()
        assert stays.is_right
        assert observer.total == WEIGHT_BYTES
        if first == "fork":
            until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the parent to count for its own pages again")
        stays.memory.check_integrity()
        stays.memory.close()
        assert observer.total == 0
        assert resident(parent) == 0, "pages are left"


def test_a_fork_that_is_killed_gives_its_lease_back(tmp_path):
    with family(tmp_path, forks=0) as (parent,):
        code = ("import sys; from pathlib import Path; from tests.memory.test_weight_sharing import Worker\n"
                "worker = Worker(Path(sys.argv[1]), sys.argv[2]); print(worker.is_right, flush=True); input()")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(tmp_path / "weights")],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert (parent.ledger.reserved, parent.ledger.total) == (0, WEIGHT_BYTES)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the parent to count for its own pages again")
        assert parent.is_right
        parent.memory.check_integrity()
        parent.sleep()
        assert (parent.ledger.total, resident(parent)) == (0, 0), "what the killed one had is not given back"


def test_a_parent_may_sleep_and_wake_while_its_fork_serves(tmp_path):
    with family(tmp_path) as (parent, fork):
        assert parent.sleep(level=2) == WEIGHT_BYTES
        assert fork.is_right
        assert fork.ledger.total == WEIGHT_BYTES
        parent.wake()
        assert parent.is_right
        assert fork.is_right
        assert parent.ledger.total == 2 * WEIGHT_BYTES, "they have pages of their own now"
        fork.memory.close()
        parent.memory.check_integrity()
        assert parent.ledger.total == WEIGHT_BYTES


def test_a_fork_that_wakes_up_shares_again_where_it_can(tmp_path):
    with family(tmp_path) as (parent, fork):
        assert fork.sleep() == 0, "it gave back what it did not have"
        until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the lease to end")
        fork.wake()
        assert (fork.is_right, fork.loads, fork.ledger.total) == (True, 0, WEIGHT_BYTES)
        fork.sleep()
        parent.sleep()
        assert parent.ledger.total == 0
        fork.wake()
        assert (fork.is_right, fork.loads, fork.ledger.reserved) == (True, 1, WEIGHT_BYTES)
        fork.memory.check_integrity()
        fork.sleep()
        parent.wake()
        fork.wake()
        assert (fork.is_right, fork.loads, fork.ledger.reserved) == (True, 1, 0)
        for worker in (parent, fork):
            worker.memory.check_integrity()


def test_twenty_cycles_leave_nothing(tmp_path):
    with family(tmp_path) as (parent, fork):
        files = len(os.listdir("/proc/self/fd"))
        for i in range(20):
            for worker in ((parent, fork), (fork, parent))[i % 2]:
                worker.sleep()
            for worker in (parent, fork):
                worker.wake()
            assert parent.is_right
            assert fork.is_right
            assert parent.ledger.total == WEIGHT_BYTES
        assert len(os.listdir("/proc/self/fd")) <= files + 1
        assert os.fstat(parent.driver._file).st_size <= 2 * WEIGHT_BYTES


def test_a_wake_up_that_is_aborted_returns_the_lease(tmp_path):
    with family(tmp_path) as (parent, fork):
        fork.sleep()
        fork.residency.prepare_wake(77, (WEIGHTS_TAG,))
        fork.residency.abort(77)
        until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the lease to end")
        fork.memory.check_integrity()
        fork.wake()
        assert fork.is_right


def test_a_wake_up_that_is_refused_memory_for_its_cache_returns_the_lease(tmp_path, monkeypatch):
    with family(tmp_path) as (parent, fork):
        fork.sleep()
        until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the lease to end")

        def refuse(more: int) -> None:
            raise PageGrowthRefused("memory", f"{more} bytes, as the test says")

        with monkeypatch.context() as patched:
            patched.setattr(fork.memory, "check_growth", refuse)
            with pytest.raises(PageGrowthRefused):
                fork.wake()
        until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the lease to end again")
        fork.memory.check_integrity()
        fork.wake()
        assert fork.is_right


def test_other_settings_are_refused(tmp_path):
    with family(tmp_path, forks=0) as (parent,):
        with pytest.raises(WeightsUnavailable, match="another layout"):
            Worker(tmp_path, str(tmp_path / "weights"), length=LENGTH - 1)
        until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the lease to end")
        assert Worker(tmp_path, str(tmp_path / "weights")).is_right


def test_of_weights_that_are_asleep_or_gone_nothing_is_had(tmp_path):
    with family(tmp_path, forks=0) as (parent,):
        parent.sleep()
        with pytest.raises(WeightsUnavailable, match="asleep"):
            Worker(tmp_path, str(tmp_path / "weights"))
        parent.memory.close()
        with pytest.raises(WeightsUnavailable, match="cannot be shared"):
            Worker(tmp_path, str(tmp_path / "weights"))


def test_whoever_says_something_else_is_none_of_its_business(tmp_path):
    with family(tmp_path, forks=0):
        for words in (b"GET / HTTP/1.1", b""):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(tmp_path / "weights"))
                stranger.send(words)
        fork = Worker(tmp_path, str(tmp_path / "weights"))
        assert fork.is_right
        fork.memory.close()


@pytest.mark.parametrize("nth", [1, BATCH + 2])
def test_an_import_that_fails_leaves_nothing(tmp_path, monkeypatch, nth):
    imports, left = MemfdVirtualMemory.import_page, nth

    def failing(self: MemfdVirtualMemory, exported: int, size: int) -> int:
        nonlocal left
        left -= 1
        if not left:
            raise PlatformError("import failed, as the test says")
        return imports(self, exported, size)

    with family(tmp_path, forks=0) as (parent,):
        monkeypatch.setattr(MemfdVirtualMemory, "import_page", failing)
        driver = MemfdVirtualMemory(lambda: 1 << 40)
        pool = PhysicalPagePool(driver, PAGE, 0, elastic=True)
        with pytest.raises(WeightsUnavailable, match="as the test says"):
            WeightImporter(str(tmp_path / "weights"), pool).take(WeightRegion(pool, layout()))
        assert not driver._pages
        until(lambda: parent.ledger.reserved == WEIGHT_BYTES, "the lease to end")
        parent.memory.check_integrity()
        parent.sleep()
        assert resident(parent) == 0
