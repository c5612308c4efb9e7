"""The order of the CUDA driver's calls, over a fake of its bindings; the device's own answers are the contract's."""

from __future__ import annotations

import sys

import pytest
from xllm_platform.base import OutOfMemoryError, PlatformError
from xllm_platform.cuda import virtual_memory
from xllm_platform.cuda.virtual_memory import CudaVirtualMemory

from tests.support.fake_cuda_driver import GRANULE, FakeCudaDriver
from tests.support.memory_driver_contract import WRONG


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
