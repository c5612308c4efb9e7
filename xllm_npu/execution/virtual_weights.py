"""Weights in virtual memory, between settings and a model: planned, and opened before anything else takes memory.

A model is built twice: once without memory (a network of transformers with the host's, which is not written to), which
says how large its weights are and where each will lie, and once over the pages that were taken for them. What an
architecture from outside allocates past the hook of xllm_models.weight_memory is refused, since it would not sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xllm_models.weight_memory import WeightLayout, allocating_in
from xllm_platform.base import OutOfMemoryError, Platform
from xllm_platform.cpu.device import CpuPlatform

from xllm_npu.config.settings import Settings
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.execution.rank import Rank
from xllm_npu.execution.virtual_kv import growth_rule, kv_page_bytes, open_driver, selecting
from xllm_npu.memory.weight_contents import SleepOptions, WeightLoader
from xllm_npu.memory.weight_export import WeightExporter
from xllm_npu.memory.weight_import import WeightImporter, WeightsUnavailable
from xllm_npu.memory.weight_regions import WeightRegion
from xllm_npu.memory.worker_residency import WorkerResidency
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused

Build = Callable[[], Any]


def build_over_pages(
    settings: Settings, platform: Platform, build: Build, block_bytes: Callable[[Any], int], *, sharers: int,
    workspace_bytes: int, rank: Rank,
) -> tuple[Any, WorkerMemoryResources]:
    """(a model whose weights lie in pages and are not loaded yet, those pages and what else will come of them).

    Where the rank takes another model's weights, they are loaded. `block_bytes` of a model: what a KV block takes in
    one region. Raises LoadError if the weights do not fit or cannot be had, or if the model keeps some elsewhere.
    """
    kv, planned = settings.kv_cache, WeightLayout()
    driver = open_driver(kv, platform)
    with allocating_in(planned):
        probe = build()
    size = kv.phy_page_granularity_size
    if kv.enable_vmm_kvcache:
        size = kv_page_bytes(kv, driver, block_bytes(probe))
    ledger = rank.open_ledger(platform)
    growth = growth_rule(kv, platform, sharers, workspace_bytes, ledger) if kv.vmm_elastic else None
    memory = WorkerMemoryResources(driver, None, growth, platform.synchronize, selecting(platform), page_bytes=size,
                                   ledger=ledger)
    try:
        importer = WeightImporter(rank.weights_from, memory.pool) if rank.weights_from else None
        region = memory.open_weights(planned, importer)
    except WeightsUnavailable as error:
        raise LoadError(str(error)) from error
    except (OutOfMemoryError, PageGrowthRefused) as error:
        raise LoadError(f"The weights take {planned.size:,} bytes of virtual memory, which cannot be had: {error} "
                        "Raise max_cache_size or max_memory_utilization if they are set, or free memory.") from error
    try:
        with allocating_in(region):
            model = build()
        _check_inside(model, region)
    except BaseException:
        memory.close()
        raise
    return model, memory


def _check_inside(model: Any, region: WeightRegion) -> None:
    assert region.complete, "the model has allocated fewer weights than were planned"
    outside = [name for name, tensor in model.state_dict(keep_vars=True).items() if not region.contains(tensor)]
    if outside:
        raise LoadError(f"{type(model).__name__} keeps {outside[0]} and {len(outside) - 1} other tensors outside of "
                        "virtual memory: leave --enable-vmm-weights out.")


def make_sleepy(memory: WorkerMemoryResources, platform: Platform, loader: WeightLoader, rank: Rank) -> None:
    """From now on this worker can sleep, and others may have its weights, which are loaded. Raises OSError."""
    capabilities = platform.capabilities
    if rank.weights and memory.importer is None and capabilities.shared_pages != "none":
        memory.exporter = WeightExporter(rank.weights, memory, capabilities.shared_pages)
    memory.residency = WorkerResidency(memory, SleepOptions(
        loader=loader, host_copy=not capabilities.shared_memory, pinned=capabilities.pinned_memory,
        empty_cache=platform.empty_cache, empty_host_cache=platform.empty_host_cache,
        host_room=lambda: CpuPlatform().memory_info().free // rank.ranks_here))
