"""Virtual memory on Ascend: ACL's reserve, physical and map calls behind `VirtualMemoryDriver`.

Physical memory is HBM in huge pages of the selected device. A physical handle is mapped whole at offset 0, the only use
that CANN documents. Not to be used beside PYTORCH_NPU_ALLOC_CONF=expandable_segments:True on the same ranges; the
caching allocator keeps its own.

Pages go to other processes by shareable handles, which are numbers: one for each page, for good, and every importer
must be named before it imports (aclrtMemSetPidToShareableHandle) by what aclrtDeviceGetBareTgid says in its process.
The memory goes when all processes have freed their handle.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from ctypes import byref, c_int32, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING

from xllm_platform.base import PlatformError, VirtualMemoryDriver
from xllm_platform.npu.acl import Acl, Location, PhysicalProperties

if TYPE_CHECKING:
    import torch

# acl_rt.h: aclrtMemAllocationType, aclrtMemHandleType, aclrtMemAttr, aclrtMemLocationType, granularity options
_PINNED, _NO_HANDLE, _HBM_HUGE, _ON_DEVICE, _MINIMUM = 0, 0, 4, 1, 0
_HUGE_PAGES = 1  # flag of aclrtReserveMemAddress: a range for pages of 2 MiB
_FORMAT_ND = 2


class AclVirtualMemory(VirtualMemoryDriver):
    def __init__(self, device: int) -> None:
        self._device = device
        self._acl = Acl.load()
        self._properties = PhysicalProperties(_NO_HANDLE, _PINNED, _HBM_HUGE, Location(device, _ON_DEVICE), 0)
        self._sizes: dict[int, int] = {}  # page -> bytes
        self._exported: dict[int, int] = {}  # page -> shareable handle
        self._imported: set[int] = set()
        size = c_size_t()
        self._acl.call("aclrtMemGetAllocationGranularity", byref(self._properties), _MINIMUM, byref(size))
        self._granularity = size.value

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, size: int) -> int:
        self._check_size(size)
        address = c_void_p()
        self._acl.call("aclrtReserveMemAddress", byref(address), size, 0, None, _HUGE_PAGES)
        assert address.value is not None
        return address.value

    def free_range(self, address: int) -> None:
        self._acl.call("aclrtReleaseMemAddress", address)

    def create_page(self, size: int) -> int:
        self._check_size(size)
        page = c_void_p()
        self._acl.call("aclrtMallocPhysical", byref(page), size, byref(self._properties), 0)
        assert page.value is not None
        self._sizes[page.value] = size
        return page.value

    def release_page(self, page: int) -> None:
        self._size_of(page)
        self._acl.call("aclrtFreePhysical", page)
        del self._sizes[page]
        self._exported.pop(page, None)
        self._imported.discard(page)

    @property
    def importer(self) -> int:
        found = c_int32()
        self._acl.call("aclrtDeviceGetBareTgid", byref(found))
        return found.value

    def export_page(self, page: int, importer: int) -> int:
        self._size_of(page)
        if page in self._imported:
            raise PlatformError(f"Page {page:#x} is another process's, which alone can export it.")
        if page not in self._exported:  # a second export of the same page is an error
            shared = c_uint64()
            self._acl.call("aclrtMemExportToShareableHandle", page, _NO_HANDLE, 0, byref(shared))
            self._exported[page] = shared.value
        self._acl.call("aclrtMemSetPidToShareableHandle", self._exported[page], byref(c_int32(importer)), 1)
        return self._exported[page]

    def import_page(self, exported: int, size: int) -> int:
        self._check_size(size)
        page = c_void_p()
        self._acl.call("aclrtMemImportFromShareableHandle", exported, self._device, byref(page))
        assert page.value is not None
        self._sizes[page.value] = size
        self._imported.add(page.value)
        return page.value

    def map(self, address: int, page: int) -> None:
        if address % self._granularity:
            raise PlatformError(f"Address {address:#x} is no multiple of the granularity, {self._granularity}.")
        self._acl.call("aclrtMapMem", address, self._size_of(page), 0, page, 0)

    def unmap(self, address: int) -> None:
        self._acl.call("aclrtUnmapMem", address)

    def view(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        extension = importlib.import_module("torch_npu")._C
        device = torch.device("npu", self._device)
        sizes, size = tuple(shape), math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        storage = extension._construct_storage_from_data_pointer(address, device, size)
        return extension._construct_NPU_Tensor_From_Storage_And_Metadata(
            {"size": sizes, "stride": strides, "nbytes": size, "dtype": dtype, "data_ptr": address, "storage_offset": 0,
             "device": device, "npu_format": _FORMAT_ND, "layout": torch.strided, "requires_grad": False}, storage)

    def _check_size(self, size: int) -> None:
        if size <= 0 or size % self._granularity:
            raise PlatformError(f"{size} bytes are no multiple of the granularity, {self._granularity}.")

    def _size_of(self, page: int) -> int:
        if page not in self._sizes:
            raise PlatformError(f"There is no page {page:#x}.")
        return self._sizes[page]

