"""All pages of a pool in one range, page id times page size, for as long as somebody leases it.

What registers memory with a transport needs one dense arena whose pages neither move nor go: a lease is had only of a
pool that is fully resident, and the mapping stays until the last lease is returned. Offsets in it are offsets in the
pool, not in any tensor.
"""

from __future__ import annotations

from xllm_npu.memory.mapped_region import MappedVirtualMemoryRegion
from xllm_npu.memory.physical_pages import PhysicalPagePool


class NotResident(RuntimeError):
    """Pages come and go in this pool, so that it cannot be registered; the message names the setting."""


class MappingLease:
    """Keeps the mapping alive until `close`."""

    def __init__(self, mapping: SharedPhysicalPageMapping) -> None:
        self._mapping: SharedPhysicalPageMapping | None = mapping
        self.address, self.size = mapping.address, mapping.size

    def close(self) -> None:
        if self._mapping is not None:
            mapping, self._mapping = self._mapping, None
            mapping._return()


class SharedPhysicalPageMapping:
    def __init__(self, pool: PhysicalPagePool) -> None:
        self._pool = pool
        self._region: MappedVirtualMemoryRegion | None = None
        self.num_leases = 0

    @property
    def address(self) -> int:
        assert self._region is not None, "there is no lease"
        return self._region.address

    @property
    def size(self) -> int:
        return self._pool.num_pages * self._pool.page_bytes

    def offset_of(self, page: int) -> int:
        """Bytes from the mapping's beginning to a physical page."""
        assert 0 <= page < self._pool.num_pages
        return page * self._pool.page_bytes

    def lease(self) -> MappingLease:
        """Map everything if nobody has yet. Raises NotResident."""
        if not self._pool.fully_resident:
            raise NotResident("Memory that grows and shrinks cannot be registered for transfers: turn vmm_elastic off.")
        if self._region is None:
            region = MappedVirtualMemoryRegion(self._pool, self.size)
            try:
                for page in range(self._pool.num_pages):
                    region.map(self.offset_of(page), page)
            except BaseException:
                region.close()
                raise
            self._region = region
        self.num_leases += 1
        return MappingLease(self)

    def _return(self) -> None:
        self.num_leases -= 1
        if not self.num_leases and self._region is not None:
            self._region.close()
            self._region = None
