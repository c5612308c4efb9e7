"""`cuda.bindings.driver` as far as the virtual memory driver calls it, by bookkeeping; every call returns a tuple."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULE = 2 << 20


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeCudaDriver:
    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, free: int = 1 << 36) -> None:
        self.free = free
        self.ranges: dict[int, int] = {}
        self.pages: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.imported: set[int] = set()
        self.fail: str = ""  # the call that fails next

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace()

    def _result(self, name: str, ok: bool = True) -> CUresult:
        if self.fail == name:
            self.fail = ""
            ok = False
        return CUresult.CUDA_SUCCESS if ok else CUresult.CUDA_ERROR_INVALID_VALUE

    def cuGetErrorString(self, error: CUresult) -> tuple[CUresult, bytes]:
        return CUresult.CUDA_SUCCESS, error.name.encode()

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[CUresult, int]:
        return self._result("granularity"), GRANULE

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[CUresult, int]:
        start = (len(self.ranges) + 1) << 40
        self.ranges[start] = size
        return self._result("reserve"), start

    def cuMemAddressFree(self, address: int, size: int) -> tuple[CUresult]:
        return (self._result("free", self.ranges.pop(address, None) == size),)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[CUresult, int]:
        if size > self.free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        handle = max(self.pages, default=100) + 1
        self.pages[handle], self.free = size, self.free - size
        return self._result("create"), handle

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:
        size = self.pages.pop(handle, None)
        self.free += 0 if handle in self.imported else size or 0
        return (self._result("release", size is not None),)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[CUresult]:
        inside = any(start <= address and address + size <= start + length for start, length in self.ranges.items())
        result = self._result("map", inside and address not in self.mapped and self.pages.get(handle) == size)
        if result == CUresult.CUDA_SUCCESS:
            self.mapped[address] = size
        return (result,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[CUresult]:
        self.accessible.discard(address)
        return (self._result("unmap", self.mapped.pop(address, None) == size),)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[CUresult]:
        result = self._result("access", address in self.mapped and len(access) == count)
        if result == CUresult.CUDA_SUCCESS:
            self.accessible.add(address)
        return (result,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[CUresult, int]:
        return self._result("export", handle in self.pages and handle not in self.imported), 3

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> tuple[CUresult, int]:
        handle = 500 + len(self.imported)
        self.imported.add(handle)
        self.pages[handle] = GRANULE
        return self._result("import", kind == 1), handle
