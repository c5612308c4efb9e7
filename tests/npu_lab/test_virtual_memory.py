"""The NPU platform's virtual memory driver over ACL: pages at several addresses, tensors over them, what is refused; a
page in another process; and allocator statistics.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_int32, c_uint64, c_void_p
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch_npu
from npu_emulator import fake_cann
from xllm_platform.base import OutOfMemoryError, Platform, PlatformError, VirtualMemoryDriver
from xllm_platform.npu import acl as acl_module
from xllm_platform.npu import virtual_memory
from xllm_platform.npu.acl import MEANINGS, OUT_OF_MEMORY, Acl, AclError
from xllm_platform.registry import select

from tests.npu_lab.mutation import mutated

pytestmark = pytest.mark.npu_lab


@pytest.fixture
def platform() -> Platform:
    found = select("npu")
    found.set_device(0)
    return found


@pytest.fixture
def driver(platform: Platform) -> Iterator[VirtualMemoryDriver]:
    assert platform.capabilities.virtual_memory
    before = fake_cann.counters()
    yield platform.virtual_memory()
    left = fake_cann.counters().since(before)
    assert (left["physical_bytes_live"], left["mappings_live"]) == (0, 0), "the test left pages or mappings"


@pytest.fixture
def twice(driver: VirtualMemoryDriver) -> Iterator[tuple[VirtualMemoryDriver, int, int]]:
    """(driver, address, page): four pages reserved; one physical page mapped as the first and the third."""
    size = driver.granularity
    start, page = driver.reserve(4 * size), driver.create_page(size)
    for i in (0, 2):
        driver.map(start + i * size, page)
    yield driver, start, page
    for i in (0, 2):
        driver.unmap(start + i * size)
    driver.release_page(page)
    driver.free_range(start)


def test_a_page_shows_at_each_of_its_addresses(twice) -> None:
    driver, start, _ = twice
    size = driver.granularity
    first, other = (driver.view(start + i * size, (2, size // 8), torch.float32) for i in (0, 2))
    first.fill_(3)
    first[1, 0] = 5
    assert first.device == torch.device("npu", 0)
    assert other.tolist() == first.tolist()
    assert other[1, 0] == 5
    assert other.is_contiguous()


def test_a_view_owns_nothing(twice) -> None:
    driver, start, _ = twice
    view = driver.view(start, (8,), torch.int32)
    view.fill_(7)
    del view
    assert driver.view(start, (8,), torch.int32).tolist() == [7] * 8


def test_memory_is_taken_by_pages_and_given_back(driver: VirtualMemoryDriver, platform: Platform) -> None:
    size, free = 4 * driver.granularity, platform.memory_info().free
    start = driver.reserve(64 * size)
    assert platform.memory_info().free == free
    page = driver.create_page(size)
    assert platform.memory_info().free == free - size
    for i in (0, 5):
        driver.map(start + i * size, page)
        driver.unmap(start + i * size)
    driver.release_page(page)
    assert platform.memory_info().free == free
    driver.free_range(start)


def test_no_memory_left(driver: VirtualMemoryDriver, platform: Platform) -> None:
    size = platform.memory_info().total // driver.granularity * driver.granularity
    with pytest.raises(OutOfMemoryError, match=r"aclrtMallocPhysical failed with 207001: no memory is left") as caught:
        driver.create_page(size)
    assert isinstance(caught.value, AclError)
    assert (caught.value.call, caught.value.code) == ("aclrtMallocPhysical", 207001)


WRONG: dict[str, tuple[Callable[[VirtualMemoryDriver, int, int], object], str]] = {
    "mapped already": (lambda d, start, page: d.map(start, page), "aclrtMapMem failed with 107000: an argument"),
    "not reserved": (lambda d, start, page: d.map(start + 4 * d.granularity, page), "aclrtMapMem failed"),
    "between pages": (lambda d, start, page: d.map(start + 4096, page), "no multiple of the granularity"),
    "no page": (lambda d, start, page: d.map(start + d.granularity, page + 1), "There is no page"),
    "not mapped": (lambda d, start, page: d.unmap(start + d.granularity), "aclrtUnmapMem failed with 107000"),
    "half a page": (lambda d, start, page: d.create_page(d.granularity // 2), "no multiple of the granularity"),
    "an empty range": (lambda d, start, page: d.reserve(0), "no multiple of the granularity"),
    "no range": (lambda d, start, page: d.free_range(start + d.granularity), "aclrtReleaseMemAddress failed with 1070"),
    "a range in use": (lambda d, start, page: d.free_range(start), "aclrtReleaseMemAddress failed with 107000"),
    "no page to release": (lambda d, start, page: d.release_page(page + 1), "There is no page"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refusals_name_call_code_and_meaning(twice, what: str) -> None:
    call, message = WRONG[what]
    with pytest.raises(PlatformError, match=message):
        call(*twice)


def test_what_is_changed_there_works_unchanged(driver: VirtualMemoryDriver) -> None:
    use_once(virtual_memory)


@pytest.mark.parametrize(("old", "new"), [
    ("self._size_of(page), 0, page, 0)", "self._size_of(page), 4096, page, 0)"),
    ("byref(address), size, 0, None, _HUGE_PAGES", "byref(address), 0, size, None, _HUGE_PAGES"),
    ("byref(page), size, byref", "byref(page), size + 1, byref"),
    ("Location(device, _ON_DEVICE)", "Location(device + 99, _ON_DEVICE)"),
    ('"stride": strides', '"stride": strides[::-1]'),
    ('math.prod(sizes[i + 1 :])', 'math.prod(sizes[:i])'),
    ('"storage_offset": 0', '"storage_offset": 4'),
    ('"aclrtUnmapMem", address', '"aclrtReleaseMemAddress", address'),
])
def test_a_changed_call_is_noticed(platform: Platform, old: str, new: str) -> None:
    with pytest.raises((PlatformError, AssertionError, RuntimeError)):
        use_once(mutated(virtual_memory, old, new))


def use_once(module: ModuleType) -> None:
    driver = module.AclVirtualMemory(0)
    size = driver.granularity
    start, page = driver.reserve(size), driver.create_page(size)
    driver.map(start, page)
    view = driver.view(start, (2, 8), torch.int32)
    view.copy_(torch.arange(16).view(2, 8))
    assert (ctypes.c_int32 * 16).from_address(start)[:] == list(range(16))
    driver.unmap(start)
    driver.free_range(start)
    driver.release_page(page)


def test_every_code_is_in_the_header_and_says_what_it_says_there() -> None:
    include = Path(torch_npu.__file__).parent / "include/acl"
    header = (include / "error_codes/rt_error_codes.h").read_text() + (include / "acl_base_rt.h").read_text()
    known = {int(code): name for name, code in re.findall(r"(ACL_ERROR_\w+)\s*=?\s*(\d{6})", header)}
    assert set(MEANINGS) <= set(known)
    assert {known[code] for code in OUT_OF_MEMORY} == {"ACL_ERROR_RT_MEMORY_ALLOCATION", "ACL_ERROR_RT_DEVICE_OOM"}


def test_what_a_call_that_this_cann_lacks_says() -> None:
    class Empty:
        pass

    with pytest.raises(PlatformError, match="no aclrtMapMem: it is too old"):
        Acl(Empty()).call("aclrtMapMem")
    assert Acl(Empty()).streams_left() is None


def test_prototypes_are_those_of_the_header() -> None:
    header = (Path(torch_npu.__file__).parent / "include/acl/acl_rt.h").read_text()
    for name, arguments in acl_module._PROTOTYPES.items():
        found = re.search(rf"aclError {name}\(([^)]*)\)", header)
        assert found is not None, name
        assert len(found[1].split(",")) == len(arguments), name


def test_a_page_is_shared_with_another_process(twice) -> None:
    driver, start, page = twice
    size, handle = driver.granularity, c_uint64()
    acl = fake_cann.acl
    assert acl.aclrtMemExportToShareableHandle(c_void_p(page), 0, c_uint64(1), byref(handle)) == 0
    code = f"""
import ctypes
from ctypes import *
acl = CDLL('libascendcl.so')
page, at = c_void_p(), c_void_p()
assert acl.aclrtSetDevice(0) == 0
assert acl.aclrtMemImportFromShareableHandle(c_uint64({handle.value}), 0, byref(page)) == 0
assert acl.aclrtReserveMemAddress(byref(at), c_size_t({size}), c_size_t(0), None, c_uint64(1)) == 0
assert acl.aclrtMapMem(at, c_size_t({size}), c_size_t(0), page, c_uint64(0)) == 0
memset(at.value, 9, 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert driver.view(start, (1,), torch.int32).item() == c_int32(0x09090909).value


def test_peaks_of_the_allocator(platform: Platform) -> None:
    platform.empty_cache()
    platform.reset_peak_stats()
    before = platform.allocator_stats()
    block = torch.empty(64 << 20, dtype=torch.uint8, device=platform.device())
    del block
    platform.empty_cache()
    after = platform.allocator_stats()
    assert after.peak_allocated >= before.allocated + (64 << 20)
    assert after.peak_reserved >= after.peak_allocated
    assert after.allocated == before.allocated
    platform.reset_peak_stats()
    assert platform.allocator_stats().peak_allocated == after.allocated
