"""Virtual memory on NVIDIA GPUs: the driver's reserve, create, map and access calls, by cuda-bindings.

CUDA driver API, "Virtual Memory Management". A page is device memory of the selected GPU; it can be handed to another
process as a file descriptor. Importing this file imports neither torch nor cuda-bindings.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xllm_platform.base import OutOfMemoryError, PlatformError, VirtualMemoryDriver

if TYPE_CHECKING:
    import torch


class CudaVirtualMemory(VirtualMemoryDriver):
    def __init__(self, device: int) -> None:
        """`device` as torch counts. Raises PlatformError where cuda-bindings is not installed."""
        self._device = device
        self._driver = _bindings()
        d = self._driver
        self._properties = d.CUmemAllocationProp()
        self._properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        self._shareable = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties.requestedHandleTypes = self._shareable
        self._access = d.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))
        self._ranges: dict[int, int] = {}  # address -> size, as are the mappings
        self._pages: dict[int, tuple[Any, int]] = {}  # handle as a number -> handle, size
        self._imported: set[int] = set()
        self._mappings: dict[int, tuple[int, int]] = {}  # address -> page, size
        self._mapped: dict[int, int] = {}  # page -> mappings; only those that have some

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, size: int) -> int:
        self._check_size(size)
        address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        self._ranges[address] = size
        return address

    def free_range(self, address: int) -> None:
        if address not in self._ranges:
            raise PlatformError(f"cuMemAddressFree: no range begins at {address:#x}.")
        end = address + self._ranges[address]
        if any(address <= mapping < end for mapping in self._mappings):
            raise PlatformError(f"cuMemAddressFree: pages are mapped in the range at {address:#x}.")
        self._call("cuMemAddressFree", address, self._ranges[address])
        del self._ranges[address]

    def create_page(self, size: int) -> int:
        self._check_size(size)
        handle = self._call("cuMemCreate", size, self._properties, 0)
        self._pages[int(handle)] = handle, size
        return int(handle)

    def release_page(self, page: int) -> None:
        handle, _ = self._page(page)
        if page in self._mapped:  # CUDA would keep the memory until the last mapping goes
            raise PlatformError(f"cuMemRelease: page {page:#x} is mapped {self._mapped[page]} times; unmap it first.")
        self._call("cuMemRelease", handle)
        del self._pages[page]
        self._imported.discard(page)

    def map(self, address: int, page: int) -> None:
        if address % self._granularity:
            raise PlatformError(f"Address {address:#x} is no multiple of the granularity, {self._granularity}.")
        handle, size = self._page(page)
        self._call("cuMemMap", address, size, 0, handle, 0)
        try:
            self._call("cuMemSetAccess", address, size, [self._access], 1)
        except PlatformError:
            self._call("cuMemUnmap", address, size)
            raise
        self._mappings[address] = page, size
        self._mapped[page] = self._mapped.get(page, 0) + 1

    def unmap(self, address: int) -> None:
        if address not in self._mappings:
            raise PlatformError(f"cuMemUnmap: no mapping begins at {address:#x}.")
        page, size = self._mappings[address]
        self._call("cuMemUnmap", address, size)
        del self._mappings[address]
        self._mapped[page] -= 1
        if not self._mapped[page]:
            del self._mapped[page]

    def view(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import torch

        from xllm_platform.cuda.unowned import tensor_at

        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return tensor_at(address, shape, strides, dtype, torch.device("cuda", self._device))

    def export_page(self, page: int, importer: int) -> int:
        if page in self._imported:
            raise PlatformError(f"Page {page:#x} is another process's, which alone can export it.")
        return int(self._call("cuMemExportToShareableHandle", self._page(page)[0], self._shareable, 0))

    def import_page(self, exported: int, size: int) -> int:
        self._check_size(size)
        handle = self._call("cuMemImportFromShareableHandle", exported, self._shareable)
        self._pages[int(handle)] = handle, size
        self._imported.add(int(handle))
        return int(handle)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            kind = OutOfMemoryError if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else PlatformError
            raise kind(f"{name} failed with {int(error)}: {_meaning(self._driver, error)}")
        return values[0] if values else None

    def _check_size(self, size: int) -> None:
        if size <= 0 or size % self._granularity:
            raise PlatformError(f"{size} bytes are no multiple of the granularity, {self._granularity}.")

    def _page(self, page: int) -> tuple[Any, int]:
        if page not in self._pages:
            raise PlatformError(f"There is no page {page:#x}.")
        return self._pages[page]


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise PlatformError("Platform cuda has virtual memory (capabilities.virtual_memory) where cuda-bindings is "
                            "installed: pip install 'xllm-npu[cuda]'.") from error


def _meaning(driver: Any, error: Any) -> str:
    _, text = driver.cuGetErrorString(error)
    return text.decode() if text else str(error)
