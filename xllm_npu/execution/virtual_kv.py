"""The KV cache in virtual memory, between settings and a loaded worker: its layout, its growth rule, its resources.

A fixed arena has the capacity of the physical cache, resident from the start. An elastic one reserves addresses for
all memory that its ceilings allow, and takes physical pages when blocks are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from xllm_models.attention.base import PagedBackend
from xllm_platform.base import Platform, VirtualMemoryDriver

from xllm_npu.config.kv_cache import KvCacheSettings
from xllm_npu.config.names import flag
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.memory.device_ledger import DeviceLedger
from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.kv_capacity import CacheTooSmall
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_layout import PageLayout, page_layout


@dataclass(slots=True, frozen=True, kw_only=True)
class VirtualKV:
    """What a worker needs for its KV cache to be in virtual memory."""

    driver: VirtualMemoryDriver
    layout: PageLayout
    growth: GrowthRule | None  # None: fixed
    synchronize: Callable[[], None]
    select_device: Callable[[], None]
    ledger: DeviceLedger | None = None
    memory: WorkerMemoryResources | None = None  # with the weights in it, where those are in virtual memory too

    @property
    def num_blocks(self) -> int:
        """Block ids, the dummy included."""
        return self.layout.num_block_ids

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences could have by what is free now, the dummy included."""
        if self.growth is None:
            return self.num_blocks
        taken = 0 if self.memory is None else self.memory.committed_bytes
        pages = self.growth.growable_bytes(taken) // self.layout.total_page_bytes
        return max(0, min(pages, self.layout.num_pages)) * self.layout.blocks_per_page

    def with_pages(self, num_pages: int) -> VirtualKV:
        """Of so many pages: what the rank with the least memory has."""
        return replace(self, layout=msgspec.structs.replace(self.layout, num_pages=num_pages))

    def resources(self) -> WorkerMemoryResources:
        if self.memory is not None:
            self.memory.open_kv(self.layout)
            return self.memory
        return WorkerMemoryResources(self.driver, self.layout, self.growth, self.synchronize, self.select_device,
                                     ledger=self.ledger)


def open_driver(settings: KvCacheSettings, platform: Platform) -> VirtualMemoryDriver:
    """Raises LoadError where the platform has no virtual memory, or none of such pages."""
    if not platform.capabilities.virtual_memory:
        names = [name for name in ("enable_vmm_kvcache", "enable_vmm_weights") if getattr(settings, name)]
        raise LoadError(f"Platform {platform.name} has no virtual memory here: leave "
                        f"{' and '.join(map(flag, names))} out.")
    driver, size = platform.virtual_memory(), settings.phy_page_granularity_size
    if size % driver.granularity:
        raise LoadError(f"phy_page_granularity_size is {size}, and pages of platform {platform.name} are multiples of "
                        f"{driver.granularity} bytes: set it to one.")
    return driver


def plan_virtual_kv(
    settings: KvCacheSettings, platform: Platform, backend: type[PagedBackend], spec: Any, *, sharers: int,
    blocks: int, most_blocks: int, workspace_bytes: int, ledger: DeviceLedger | None = None,
    memory: WorkerMemoryResources | None = None,
) -> VirtualKV:
    """`blocks`: of the physical cache, for a fixed arena; `most_blocks`: that all sequences together could use.

    `sharers` ranks take from the same memory; `workspace_bytes` of it are left to steps larger than any seen. `memory`:
    that has the weights already, whose pages, limits and ledger the cache shares.
    """
    driver = open_driver(settings, platform) if memory is None else memory.pool.driver
    regions = backend.num_kv_caches(spec)
    block_bytes = backend.kv_bytes_per_block(spec) // regions
    growth = None
    if settings.vmm_elastic:
        growth = memory.growth if memory is not None else growth_rule(settings, platform, sharers, workspace_bytes,
                                                                      ledger)
        assert growth is not None
        budget = growth.limits.reservation_bytes - (0 if memory is None else memory.committed_bytes)
    else:
        budget, most_blocks = blocks * block_bytes * regions, blocks
    layout = page_layout(page_bytes=settings.phy_page_granularity_size, granularity=driver.granularity,
                         block_bytes=block_bytes, num_regions=regions, budget=budget, most_blocks=most_blocks)
    planned = VirtualKV(driver=driver, layout=layout, growth=growth, synchronize=platform.synchronize,
                        select_device=selecting(platform), ledger=ledger, memory=memory)
    least = 2 if growth is not None else 1
    if layout.num_pages < least or planned.num_blocks < 2:
        raise CacheTooSmall(
            f"A page of the KV cache takes {layout.total_page_bytes:,} bytes over all layers, and {budget:,} are "
            f"allowed{'' if memory is None else ' beside the weights'}: raise max_cache_size or "
            "max_memory_utilization, or lower block_size or phy_page_granularity_size.")
    return planned


def kv_page_bytes(settings: KvCacheSettings, driver: VirtualMemoryDriver, block_bytes: int) -> int:
    """Of a physical page of a KV cache whose blocks take `block_bytes` in a region."""
    return page_layout(page_bytes=settings.phy_page_granularity_size, granularity=driver.granularity,
                       block_bytes=block_bytes, num_regions=1, budget=0, most_blocks=1).page_bytes


def selecting(platform: Platform) -> Callable[[], None]:
    """For threads to come: select the device that is selected now."""
    index = platform.device().index or 0
    return lambda: platform.set_device(index)


def growth_rule(settings: KvCacheSettings, platform: Platform, sharers: int, workspace_bytes: int,
                ledger: DeviceLedger | None) -> GrowthRule:
    """The ratio counts where it was set; else memory that is free is what limits growth. `max_cache_size` limits what
    weights and KV cache take together; it is not about weights alone.
    """
    explicit = "max_memory_utilization" in settings.model_fields_set
    limits = GrowthLimits(
        total_bytes=platform.memory_info().total // sharers,
        ratio=settings.max_memory_utilization if explicit else 0.0,
        max_bytes=settings.max_cache_size if settings.enable_vmm_kvcache else 0,
        reserve_bytes=settings.vmm_memory_reserve_bytes + workspace_bytes,
    )
    return GrowthRule(limits, platform.memory_info, platform.allocator_stats, sharers, ledger)
