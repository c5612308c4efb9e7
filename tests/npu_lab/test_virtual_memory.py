"""The ACL calls that reserve, map and share memory, by ctypes, and a tensor over them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p

import pytest
import torch
from npu_emulator.fake_cann import acl

pytestmark = pytest.mark.npu_lab
PAGE = 2 << 20
HBM_HUGE, ON_DEVICE = 4, 1  # ACL_HBM_MEM_HUGE, ACL_MEM_LOCATION_TYPE_DEVICE


class Location(ctypes.Structure):
    _fields_ = [("id", c_uint32), ("type", c_int)]


class Properties(ctypes.Structure):
    _fields_ = [("handle_type", c_int), ("allocation_type", c_int), ("memory", c_int), ("location", Location),
                ("reserved", c_uint64)]


@pytest.fixture
def twice(device: torch.device):
    """(address, page): four pages reserved; one physical page mapped as the first and the third."""
    torch.zeros(1, device=device)
    start, page = c_void_p(), c_void_p()
    properties = Properties(0, 0, HBM_HUGE, Location(0, ON_DEVICE), 0)
    assert acl.aclrtReserveMemAddress(byref(start), c_size_t(4 * PAGE), c_size_t(0), None, c_uint64(1)) == 0
    assert acl.aclrtMallocPhysical(byref(page), c_size_t(PAGE + 1), byref(properties), c_uint64(0)) != 0
    assert acl.aclrtMallocPhysical(byref(page), c_size_t(PAGE), byref(properties), c_uint64(0)) == 0
    for i in (0, 2):
        assert map_page(start.value + i * PAGE, page) == 0
    yield start.value, page
    for i in (0, 2):
        assert acl.aclrtUnmapMem(c_void_p(start.value + i * PAGE)) == 0
        assert acl.aclrtUnmapMem(c_void_p(start.value + i * PAGE)) != 0
    assert acl.aclrtFreePhysical(page) == 0
    assert acl.aclrtReleaseMemAddress(start) == 0
    assert acl.aclrtReleaseMemAddress(start) != 0


def map_page(address: int, page: c_void_p) -> int:
    return acl.aclrtMapMem(c_void_p(address), c_size_t(PAGE), c_size_t(0), page, c_uint64(0))


def test_a_page_shows_at_each_of_its_addresses(twice) -> None:
    start, page = twice
    assert map_page(start, page) != 0  # there is one already
    assert map_page(start + 4 * PAGE, page) != 0  # not reserved
    ctypes.memset(start, 7, PAGE)
    assert ctypes.string_at(start + 2 * PAGE, 4) == b"\7" * 4


def test_a_page_is_shared_with_another_process(twice) -> None:
    start, page = twice
    handle = c_uint64()
    assert acl.aclrtMemExportToShareableHandle(page, 0, c_uint64(1), byref(handle)) == 0
    code = f"""
import ctypes
from ctypes import *
acl = CDLL('libascendcl.so')
page, at = c_void_p(), c_void_p()
assert acl.aclrtSetDevice(0) == 0
assert acl.aclrtMemImportFromShareableHandle(c_uint64({handle.value}), 0, byref(page)) == 0
assert acl.aclrtReserveMemAddress(byref(at), c_size_t({PAGE}), c_size_t(0), None, c_uint64(1)) == 0
assert acl.aclrtMapMem(at, c_size_t({PAGE}), c_size_t(0), page, c_uint64(0)) == 0
memset(at.value, 9, 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert ctypes.string_at(start, 4) == b"\x09" * 4


def test_a_tensor_over_mapped_memory(twice, device: torch.device) -> None:
    """How a paged KV cache is made of virtual memory: what one mapping writes the other reads."""
    from torch_npu import _C

    start, _ = twice
    storage = _C._construct_storage_from_data_pointer(start, device, PAGE)
    second = _C._construct_storage_from_data_pointer(start + 2 * PAGE, device, PAGE)
    tensors = []
    for address, one in ((start, storage), (start + 2 * PAGE, second)):
        fields = {"size": (PAGE // 4,), "stride": (1,), "nbytes": PAGE, "dtype": torch.float32, "data_ptr": address,
                  "storage_offset": 0, "device": device, "npu_format": 2, "layout": torch.strided,
                  "requires_grad": False}
        tensors.append(_C._construct_NPU_Tensor_From_Storage_And_Metadata(fields, one))
    first, other = tensors
    first.fill_(3.0)
    assert first.device.type == "npu"
    assert other.cpu().eq(3).all()
    assert (other[:8] + 1).tolist() == [4.0] * 8
