"""Time to map and to unmap one virtual page of an elastic KV cache, against copying as many bytes on the device.

A virtual page is a physical page of every K and V region: the default shape is that of SmolLM2 135M, 30 layers. Mapping
goes through prepare and commit, as growth does. A copy reads and writes all bytes once; the fastest of its runs counts,
of mapping the median, and the slowest of ten.

    python benchmarks/page_mapping.py [--json] [--platform cpu] [--layers 30] [--page-bytes 2097152] [--rounds 40]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from xllm_platform.base import Platform
from xllm_platform.registry import select

from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_layout import PageLayout


def resources(platform: Platform, layout: PageLayout) -> WorkerMemoryResources:
    growth = GrowthRule(GrowthLimits(total_bytes=platform.memory_info().total), platform.memory_info,
                        platform.allocator_stats)
    return WorkerMemoryResources(platform.virtual_memory(), layout, growth, platform.synchronize)


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(platform: Platform, layout: PageLayout, rounds: int) -> dict[str, float]:
    """Milliseconds."""
    memory = resources(platform, layout)
    offset = [layout.offset_of(1)]
    mapped, unmapped = [], []
    for transaction in range(rounds):
        def grow(transaction: int = transaction) -> None:
            memory.prepare(transaction, offset)
            memory.commit(transaction)

        mapped.append(timed(grow))
        unmapped.append(timed(lambda: memory.unmap(offset)))
    memory.close()
    source = torch.ones(layout.total_page_bytes, dtype=torch.uint8, device=platform.device())
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        platform.synchronize()

    copied = min(timed(copy) for _ in range(max(5, rounds)))
    found = {"map": statistics.median(mapped), "map, slowest of ten": sorted(mapped)[-max(1, rounds // 10)],
             "unmap": statistics.median(unmapped), "copy of as many bytes": copied}
    return {name: 1e3 * seconds for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line: milliseconds")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--page-bytes", type=int, default=2 << 20, help="of a physical page")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    platform = select(given.platform)
    platform.set_device(0)
    layout = PageLayout(page_bytes=given.page_bytes, block_bytes=given.page_bytes, num_pages=2,
                        num_regions=2 * given.layers)
    figures = measure(platform, layout, given.rounds)
    print(f"{platform.device_name()}, torch {torch.__version__}: one virtual page of {layout.num_regions} x "
          f"{given.page_bytes:,} bytes, {given.rounds} rounds")
    for name, milliseconds in figures.items():
        print(f"{name:24} {milliseconds:9.2f} ms")
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
