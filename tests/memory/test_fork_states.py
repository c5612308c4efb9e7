"""A model and its forks on two devices, as a machine: growth, sleep, wake-up, fork and end, while drivers and the wire
fail at any call and processes are killed. No page is lost or counted twice; the ledgers agree with what is there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xllm_platform.base import AllocatorStats, OutOfMemoryError, PlatformError

from tests.support.book_device import BookDevice, SharingBookDriver
from tests.support.book_driver import GRANULE, fail_nth
from tests.support.sleeping_workers import LAYOUT, LOADED, LOSSES, WEIGHT_PAGES, Model, Wire, weights_of
from xllm_npu.memory.coordinator import DistributedVirtualMemoryCoordinator, SleepFailed
from xllm_npu.memory.device_ledger import DeviceLedger
from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.weight_export import WeightExporter
from xllm_npu.memory.weight_import import WeightImporter, WeightsUnavailable
from xllm_npu.memory.worker_residency import WorkerResidency
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageAllocator, PageGrowthRefused
from xllm_npu.state.messages import KV_CACHE_TAG, WEIGHTS_TAG

DRIVER_CALLS = ("create_page", "map", "unmap", "release_page", "export_page", "import_page", "reserve")
VERBS = ("prepare", "commit", "abort", "unmap", *LOSSES)
REFUSALS = (PageGrowthRefused, OutOfMemoryError, PlatformError, WeightsUnavailable, SleepFailed, ValueError)


class Process:
    """One model's: a worker on each device, and what coordinates them."""

    def __init__(self, devices: list[BookDevice], directory: Path, parent: Process | None,
                 fault: Callable[[str], Exception | None] = lambda call: None) -> None:
        """Raises what loading raises; nothing is left then."""
        self.parent = parent
        self.path = str(directory / f"weights-{time.monotonic_ns()}")
        self.drivers = [SharingBookDriver(device) for device in devices]
        self.drivers[1].fault = fault
        self.resources: list[WorkerMemoryResources] = []
        self.models: list[Model] = []
        try:
            for i, driver in enumerate(self.drivers):
                self._open(i, driver, directory)
        except BaseException:
            self.kill()
            raise
        self.drivers[1].fault = lambda call: None
        self.wires = [Wire(one) for one in self.resources]
        self.coordinator = DistributedVirtualMemoryCoordinator(self.wires, LAYOUT, has_weights=True)
        self.pages = PageAllocator(LAYOUT, self.coordinator, preallocate=False)
        self.taken: list[int] = []
        self.broken = False  # something is to fail

    def _open(self, i: int, driver: SharingBookDriver, directory: Path) -> None:
        ledger = DeviceLedger(directory / f"device-{i}")
        growth = GrowthRule(GrowthLimits(total_bytes=driver.total), driver.memory_info,
                            lambda: AllocatorStats(reserved=1, peak_reserved=1), 1, ledger)
        memory = WorkerMemoryResources(driver, None, growth, lambda: None, page_bytes=GRANULE, ledger=ledger)
        self.resources.append(memory)
        importer = None if self.parent is None else WeightImporter(f"{self.parent.path}-{i}", memory.pool)
        memory.open_weights(weights_of(WEIGHT_PAGES[i]), importer)
        memory.open_kv(LAYOUT)
        model: Any = Model()
        self.models.append(model)
        memory.residency = WorkerResidency(memory, model)
        if self.parent is None:
            memory.exporter = WeightExporter(f"{self.path}-{i}", memory, "number")

    @property
    def shares(self) -> bool:
        """Whether its weights are another process's now."""
        return any(one.importer is not None and one.importer._lease is not None for one in self.resources)

    @property
    def sleeps(self) -> bool:
        return self.coordinator.awake != {WEIGHTS_TAG, KV_CACHE_TAG}

    def heal(self) -> None:
        for driver, model, wire in zip(self.drivers, self.models, self.wires):
            driver.fault = model.fault = wire.lose_call = wire.lose_answer = lambda call: None
        self.broken = False

    def kill(self) -> None:
        """SIGKILL: descriptors are closed and pages dropped, and nobody of it does anything."""
        for memory in self.resources:
            if memory.exporter is not None:
                memory.exporter.close()
            if memory.importer is not None:
                memory.importer.release()
            if memory.pool._share is not None:
                memory.pool._share.close()
            if memory._ledger is not None:
                memory._ledger.close()
        for driver in self.drivers:
            driver.end()

    def check(self) -> None:
        for memory, driver, model in zip(self.resources, self.drivers, self.models):
            memory.check_integrity()
            assert len(driver.mapped) == len(set(driver.mapped.values())) == memory.pool.num_taken
            assert driver.pages.keys() == driver.physical.keys() == set(driver.mapped.values())
            if memory.weights is not None and memory.weights.is_mapped:
                assert model.words == LOADED
        self.pages.check_integrity()
        self.coordinator.budget.check_integrity()


class ForkMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.directory = Path(self._directory.name)
        self.family: list[Process] = []  # the parent first, unless it has ended

    @initialize(total_pages=st.integers(3, 12))
    def start(self, total_pages):
        self.devices = [BookDevice((total_pages * LAYOUT.num_regions + 2 * max(WEIGHT_PAGES)) * GRANULE) for _ in "ab"]
        self.observers = [DeviceLedger(self.directory / f"device-{i}") for i in (0, 1)]
        self.parent = Process(self.devices, self.directory, None)
        self.family.append(self.parent)

    def attempt(self, process: Process, action: Callable[[], object]) -> bool:
        """Whether it came about. Who does not know its memory any more ends."""
        try:
            action()
            return True
        except REFUSALS:
            return False
        except MemoryOwnershipLost:
            assert process.broken, "nothing had failed"
            self.family.remove(process)
            process.kill()
            return False
        finally:
            process.heal()

    @precondition(lambda self: self.parent not in self.family)
    @rule()
    def start_again(self):
        """Whoever shared the weights of the last one keeps them."""
        try:
            self.parent = Process(self.devices, self.directory, None)
            self.family.append(self.parent)
        except REFUSALS:
            pass

    @precondition(lambda self: self.parent in self.family and len(self.family) < 4)
    @rule(call=st.sampled_from(("", *DRIVER_CALLS)), n=st.integers(1, 6), theirs=st.booleans())
    def fork(self, call, n, theirs):
        fault = fail_nth(call, n)
        if theirs:
            self.parent.drivers[1].fault = fault
        try:
            self.family.append(Process(self.devices, self.directory, self.parent,
                                       (lambda call: None) if theirs else fault))
        except (*REFUSALS, MemoryOwnershipLost):
            pass
        finally:
            self.parent.heal()

    @precondition(lambda self: self.family)
    @rule(data=st.data())
    def take(self, data):
        process = data.draw(st.sampled_from(self.family))
        if KV_CACHE_TAG in process.coordinator.awake:
            self.attempt(process, lambda: process.taken.append(process.pages.take()))

    @precondition(lambda self: self.family)
    @rule(data=st.data())
    def give(self, data):
        process = data.draw(st.sampled_from(self.family))
        gone, process.taken = process.taken, []
        if gone:
            self.attempt(process, lambda: process.pages.give(gone))

    @precondition(lambda self: self.family)
    @rule(data=st.data(), level=st.sampled_from((1, 2)))
    def sleep(self, data, level):
        process = data.draw(st.sampled_from(self.family))
        if KV_CACHE_TAG not in process.coordinator.awake:
            return
        gone, process.taken = process.taken, []

        def sleep() -> None:
            process.pages.give(gone)
            process.pages.freeze()
            process.coordinator.sleep(level)

        if not self.attempt(process, sleep) and process in self.family:
            process.pages.thaw()

    @precondition(lambda self: any(process.sleeps for process in self.family))
    @rule(data=st.data(), tags=st.sampled_from((["weights"], ["kv_cache"], ["weights", "kv_cache"])))
    def wake(self, data, tags):
        process = data.draw(st.sampled_from([process for process in self.family if process.sleeps]))
        slept = KV_CACHE_TAG not in process.coordinator.awake
        if self.attempt(process, lambda: process.coordinator.wake(tags)) and slept and "kv_cache" in tags:
            process.pages.thaw()

    @precondition(lambda self: len(self.family) > 1)
    @rule(data=st.data(), kill=st.booleans())
    def end(self, data, kill):
        process = data.draw(st.sampled_from(self.family))
        self.family.remove(process)
        process.heal()
        if kill:
            process.kill()
            return
        for memory, driver in zip(process.resources, process.drivers):
            memory.close()
            assert (driver.pages, driver.mapped, driver.ranges) == ({}, {}, {})

    @precondition(lambda self: self.family)
    @rule(data=st.data(), rank=st.integers(0, 1), call=st.sampled_from(DRIVER_CALLS), n=st.integers(1, 6),
          error=st.sampled_from((PlatformError, OutOfMemoryError, ValueError)))
    def break_driver(self, data, rank, call, n, error):
        """The next action of this model, or its next export, meets it."""
        process = data.draw(st.sampled_from(self.family))
        process.drivers[rank].fault, process.broken = fail_nth(call, n, error), True

    @precondition(lambda self: self.family)
    @rule(data=st.data(), rank=st.integers(0, 1), verb=st.sampled_from(VERBS), answer=st.booleans())
    def break_wire(self, data, rank, verb, answer):
        process = data.draw(st.sampled_from(self.family))
        process.broken = True
        setattr(process.wires[rank], "lose_answer" if answer else "lose_call", fail_nth(verb, 1, ValueError))

    def settled(self) -> bool:
        """Exporters hear of leases' ends in threads of their own."""
        if self.parent not in self.family:
            return True
        leases = sum(one.importer._lease is not None for process in self.family for one in process.resources
                     if one.importer is not None and process.parent is self.parent)
        return leases == sum(len(one.exporter._leases) for one in self.parent.resources) and not any(
            one.pool._lent and not one.exporter._leases for one in self.parent.resources)

    @invariant()
    def agrees(self):
        deadline = time.monotonic() + 20
        while not self.settled():
            assert time.monotonic() < deadline, "leases do not agree"
            time.sleep(0.002)
        for process in self.family:
            process.check()
        for device, observer in zip(getattr(self, "devices", []), getattr(self, "observers", [])):
            assert device.used == observer.total, "the ledger is not what is there"

    def teardown(self):
        for process in self.family:
            process.kill()
        for device, observer in zip(getattr(self, "devices", []), getattr(self, "observers", [])):
            assert (device.used, observer.total) == (0, 0)
            observer.close()
        self._directory.cleanup()


TestForks = ForkMachine.TestCase
TestForks.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
