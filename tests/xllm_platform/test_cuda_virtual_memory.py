"""The order of the CUDA driver's calls, over a fake of its bindings; the device's own answers are the contract's."""

from __future__ import annotations

import sys

import pytest
from xllm_platform.base import OutOfMemoryError, PlatformError
from xllm_platform.cuda import virtual_memory
from xllm_platform.cuda.virtual_memory import CudaVirtualMemory

from tests.support import sleeping_workers
from tests.support.fake_cuda_driver import GRANULE, FakeCudaDriver
from tests.support.memory_driver_contract import WRONG
from xllm_npu.memory.worker_residency import WorkerResidency
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudaDriver:
    made = FakeCudaDriver()
    monkeypatch.setattr(virtual_memory, "_bindings", lambda: made)
    return made


def test_a_page_is_readable_and_writable_where_it_is_mapped(fake):
    driver = CudaVirtualMemory(0)
    assert driver.granularity == GRANULE
    start, page = driver.reserve(4 * GRANULE), driver.create_page(GRANULE)
    for i in (0, 2):
        driver.map(start + i * GRANULE, page)
    assert fake.accessible == {start, start + 2 * GRANULE}
    assert driver.export_page(page, 0) == 3
    free = fake.free
    imported = driver.import_page(3, GRANULE)
    driver.map(start + GRANULE, imported)
    with pytest.raises(PlatformError, match="another process's"):
        driver.export_page(imported, 0)
    driver.unmap(start + GRANULE)
    driver.release_page(imported)
    assert fake.free == free
    with pytest.raises(PlatformError, match="mapped 2 times"):
        driver.release_page(page)
    for i in (0, 2):
        driver.unmap(start + i * GRANULE)
    driver.release_page(page)
    driver.free_range(start)
    assert (fake.mapped, fake.pages, fake.ranges) == ({}, {}, {})


@pytest.mark.parametrize("what", WRONG)
def test_refusals(fake, what):
    driver = CudaVirtualMemory(0)
    start, page = driver.reserve(4 * GRANULE), driver.create_page(GRANULE)
    for i in (0, 2):
        driver.map(start + i * GRANULE, page)
    before = dict(fake.mapped), dict(fake.pages), dict(fake.ranges)
    with pytest.raises(PlatformError):
        WRONG[what](driver, start, page)
    assert (fake.mapped, fake.pages, fake.ranges) == before


def test_a_mapping_that_cannot_be_made_accessible_is_undone(fake):
    driver = CudaVirtualMemory(0)
    start, page = driver.reserve(GRANULE), driver.create_page(GRANULE)
    fake.fail = "access"
    with pytest.raises(PlatformError, match="cuMemSetAccess failed with 1: CUDA_ERROR_INVALID_VALUE"):
        driver.map(start, page)
    assert not fake.mapped
    driver.map(start, page)


def test_no_memory_left(fake):
    with pytest.raises(OutOfMemoryError, match="cuMemCreate failed with 2"):
        CudaVirtualMemory(0).create_page(1 << 40)


def test_without_the_bindings_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(PlatformError, match=r"pip install 'xllm-npu\[cuda\]'"):
        CudaVirtualMemory(0)


def test_weights_that_sleep_keep_their_addresses_and_give_back_all_pages(fake):
    """A worker's whole sleep and wake-up in calls of the driver; contents are none of its business here."""
    workers = sleeping_workers.Model()
    memory = WorkerMemoryResources(CudaVirtualMemory(0), None, None, lambda: None, page_bytes=GRANULE)
    memory.open_weights(sleeping_workers.layout_of(3 * GRANULE - 1))
    residency = memory.residency = WorkerResidency(memory, workers)
    before = dict(fake.mapped), dict(fake.ranges), set(fake.accessible)
    assert len(fake.pages) == len(fake.accessible) == 3
    for transaction, level in enumerate((1, 2)):
        residency.prepare_sleep(transaction, level)
        assert residency.commit_sleep(transaction) == 3 * GRANULE
        assert (fake.mapped, fake.pages, fake.accessible) == ({}, {}, set())
        fake.fail = "map"
        residency.prepare_wake(transaction, ["weights"])
        with pytest.raises(PageGrowthRefused, match="cuMemMap"):
            residency.commit_wake(transaction)
        assert (fake.mapped, fake.pages) == ({}, {})
        residency.prepare_wake(transaction, ["weights"])
        residency.commit_wake(transaction)
        residency.finish_wake(transaction)
        assert (fake.mapped, fake.ranges, fake.accessible) == before
    memory.close()
    assert (fake.mapped, fake.pages, fake.ranges) == ({}, {}, {})
