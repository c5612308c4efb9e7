"""Engines whose KV cache is in virtual memory, on the CPU with real pages, against one whose cache is not."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import psutil
import pytest
from xllm_platform.base import Capabilities
from xllm_platform.cpu.device import CpuPlatform

from tests.support.engine import run_engine
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.memory.kv_capacity import CacheTooSmall
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageAllocator

VMM = {"enable_vmm_kvcache": True, "phy_page_granularity_size": 16384}
ELASTIC = {**VMM, "vmm_elastic": True}
SMALL = {"max_model_len": 1024, "max_seqs_per_batch": 16}


def prompts(count: int, longest: int, shared: int = 0) -> list[list[int]]:
    rng = random.Random(3)
    beginning = [rng.randrange(32, 120) for _ in range(shared)]
    return [beginning + [rng.randrange(32, 120) for _ in range(rng.randrange(4, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def physical(tiny_dir: Path) -> list[list[int]]:
    return run_engine(tiny_dir, prompts(12, 200, shared=40), 120, **SMALL)[0]


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every page that an allocator gives out."""
    taken: list[int] = []
    take = PageAllocator.take

    def record(self: PageAllocator) -> int:
        taken.append(take(self))
        return taken[-1]

    monkeypatch.setattr(PageAllocator, "take", record)
    return taken


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", [VMM, ELASTIC], ids=["fixed", "elastic"])
def test_greedy_tokens_are_those_of_the_physical_cache(tiny_dir, physical, kind, overlap):
    settings = {**SMALL, **kind, "enable_schedule_overlap": overlap}
    assert run_engine(tiny_dir, prompts(12, 200, shared=40), 120, **settings)[0] == physical


def test_tokens_when_memory_grows_in_mid_decode(tiny_dir, takes):
    """Prompts that fit into the pinned page, and answers that do not."""
    asked = prompts(3, 10)
    expected, _ = run_engine(tiny_dir, asked, 400, **SMALL)
    answers, _ = run_engine(tiny_dir, asked, 400, **SMALL, **ELASTIC)
    assert answers == expected
    assert len(takes) > 5, "nothing grew"


def test_tokens_when_memory_is_short(tiny_dir, physical):
    answers, loop = run_engine(
        tiny_dir, prompts(12, 200, shared=40), 120, **SMALL, **ELASTIC, **{"max_cache_size": "640KiB"})
    assert answers == physical
    assert loop.scheduler.stats.preemptions_total > 0


def test_rule_1_without_the_flag_nothing_is_virtual(tiny_dir, monkeypatch):
    monkeypatch.setattr(CpuPlatform, "virtual_memory", lambda self: pytest.fail("a driver was made"))
    run_engine(tiny_dir, [[40, 41]], 2, **SMALL)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_every_attention_backend_of_the_cpu(tiny_dir, backend):
    asked = prompts(3, 30)
    expected, _ = run_engine(tiny_dir, asked, 60, **SMALL, attention_backend=backend)
    for kind in (VMM, ELASTIC):
        assert run_engine(tiny_dir, asked, 60, **SMALL, **kind, attention_backend=backend)[0] == expected


def test_rules_21_and_30_a_fixed_arena_has_the_physical_capacity_resident_from_the_start(tiny_dir, monkeypatch):
    made: list[WorkerMemoryResources] = []
    init = WorkerMemoryResources.__init__

    def record(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self)
        assert self.pool.fully_resident
        assert self.kv._regions[0].mapped_bytes == self.layout.region_bytes

    monkeypatch.setattr(WorkerMemoryResources, "__init__", record)
    _, loop = run_engine(tiny_dir, prompts(4, 100), 40, **SMALL, **VMM)
    assert len(made) == 1
    assert not loop.ready.elastic_kv_cache
    # But for what is no whole page.
    _, other = run_engine(tiny_dir, [[40]], 2, **SMALL)
    assert 0.9 * other.ready.num_kv_blocks < loop.ready.num_kv_blocks <= other.ready.num_kv_blocks


def test_nothing_is_left_of_an_engine_that_was_closed(tiny_dir):
    run_engine(tiny_dir, prompts(4, 100), 40, **SMALL, **ELASTIC)
    maps = Path("/proc/self/maps").read_text()
    assert "xllm-npu-pages" not in maps
    shared = psutil.Process().memory_info().shared
    for _ in range(3):
        run_engine(tiny_dir, prompts(4, 100), 40, **SMALL, **ELASTIC)
    assert psutil.Process().memory_info().shared - shared < 2**20


def test_rules_16_and_31_warm_up_takes_no_memory_beyond_the_pinned_page(tiny_dir):
    loop = EngineLoop.create(settings_from_kwargs(
        model=str(tiny_dir), dtype="float32", block_size=16, num_threads=1, max_cache_size="24MiB", **SMALL, **ELASTIC))
    stats = loop.scheduler.running.blocks.pool.page_stats()
    assert (stats.mapped, stats.pinned) == (1, 1)
    assert stats.free > 100
    loop.close()


def test_rules_17_and_18_pages_are_there_for_live_blocks_only(tiny_dir, monkeypatch):
    """After the last request the pinned page is all that is left."""
    seen: list[tuple[int, set[int]]] = []
    close = PageAllocator.close

    def look(self: PageAllocator) -> None:
        self.wait_settled()
        seen.append((self.stats().mapped, self.taken))
        close(self)

    monkeypatch.setattr(PageAllocator, "close", look)
    run_engine(tiny_dir, prompts(12, 200), 60, **SMALL, **ELASTIC)
    assert seen == [(1, {PINNED_PAGE})]


def test_platforms_without_virtual_memory_are_refused(tiny_dir, monkeypatch):
    capabilities = CpuPlatform().capabilities
    without: Capabilities = dataclasses.replace(capabilities, virtual_memory=False)
    monkeypatch.setattr(CpuPlatform, "capabilities", without)
    with pytest.raises(LoadError, match="leave --enable-vmm-kvcache out"):
        run_engine(tiny_dir, [[40]], 2, **SMALL, **VMM)


def test_page_sizes_that_the_platform_does_not_have_are_refused(tiny_dir):
    with pytest.raises(LoadError, match="multiples of 4096 bytes"):
        run_engine(tiny_dir, [[40]], 2, **SMALL, **{**VMM, "phy_page_granularity_size": 5000})


@pytest.mark.parametrize("kind", [VMM, ELASTIC], ids=["fixed", "elastic"])
def test_a_cache_without_room_for_pages_names_what_to_change(tiny_dir, kind):
    with pytest.raises(CacheTooSmall, match="phy_page_granularity_size"):
        run_engine(tiny_dir, [[40]], 2, **SMALL, **{**kind, "phy_page_granularity_size": "16MiB"})


def test_rule_37_the_reserve_counts_from_the_start(tiny_dir):
    with pytest.raises(CacheTooSmall, match="vmm_memory_reserve_bytes"):
        run_engine(tiny_dir, [[40]], 2, **SMALL, **ELASTIC, vmm_memory_reserve_bytes=2**50)
