"""Physical pages, regions, the shared mapping and the ledger, one by one."""

from __future__ import annotations

import pytest
import torch
from xllm_platform.base import OutOfMemoryError, PlatformError
from xllm_platform.cpu.device import CpuPlatform

from tests.support.book_driver import GRANULE, BookDriver, fail_nth
from xllm_npu.memory.kv_regions import VirtualKVCacheRegions
from xllm_npu.memory.mapped_region import MappedVirtualMemoryRegion
from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.page_budget import LedgerFull, WorkerPhysicalPageBudget
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.memory.shared_mapping import NotResident, SharedPhysicalPageMapping
from xllm_npu.state.kv_cache.page_layout import PageLayout

LAYOUT = PageLayout(page_bytes=GRANULE, block_bytes=1024, num_pages=5, num_regions=3)


def elastic(num_pages: int = 8, driver: BookDriver | None = None) -> tuple[PhysicalPagePool, BookDriver]:
    driver = driver or BookDriver()
    return PhysicalPagePool(driver, GRANULE, num_pages, elastic=True), driver


def test_rules_15_to_17_an_elastic_pool_has_ids_from_the_start_and_handles_on_demand():
    pool, driver = elastic()
    assert (pool.num_pages, pool.resident_bytes, driver.pages) == (8, 0, {})
    pages = pool.take(3)
    assert (pages, pool.resident_bytes, len(driver.pages)) == ([0, 1, 2], 3 * GRANULE, 3)
    pool.give([1])
    assert pool.resident_bytes == 2 * GRANULE
    assert pool.take(1) == [1], "ids are stable and used again"
    pool.check_integrity()


def test_rule_21_a_fixed_pool_is_resident_at_once_and_keeps_its_pages():
    driver = BookDriver()
    pool = PhysicalPagePool(driver, GRANULE, 8, elastic=False)
    assert pool.fully_resident
    handles = {page: pool.handle(page) for page in range(8)}
    pool.give(pool.take(5))
    assert {page: pool.handle(page) for page in range(8)} == handles
    pool.check_integrity()
    pool.close()
    assert not driver.pages


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_pool_takes_all_pages_or_none(n):
    pool, driver = elastic()
    driver.fault = fail_nth("create_page", n)
    with pytest.raises(PlatformError, match="as the test says"):
        pool.take(4)
    assert not driver.pages
    pool.check_integrity()
    assert pool.take(4) == [0, 1, 2, 3]
    with pytest.raises(OutOfMemoryError, match="4 of 8 left"):
        pool.take(5)


def test_a_creation_that_cannot_be_undone_is_no_ordinary_failure():
    pool, driver = elastic()
    driver.fault = lambda call: PlatformError(call) if call == "release_page" or len(driver.pages) == 2 else None
    with pytest.raises(MemoryOwnershipLost, match="could not be undone"):
        pool.take(4)


def test_rule_25_live_pages_never_move():
    pool, driver = elastic()
    region = MappedVirtualMemoryRegion(pool, 4 * GRANULE)
    first, second = pool.take(2)
    region.map(0, first)
    region.map(2 * GRANULE, second)
    before = dict(driver.mapped)
    region.map(GRANULE, pool.take(1)[0])
    region.unmap(2 * GRANULE)
    assert driver.mapped[region.address] == before[region.address]
    assert region.page_at(0) == first
    region.check_integrity()


def test_rule_60_views_own_nothing():
    driver = CpuPlatform().virtual_memory()
    pool = PhysicalPagePool(driver, GRANULE, 2, elastic=True)
    region = MappedVirtualMemoryRegion(pool, 2 * GRANULE)
    pages = pool.take(2)
    for i in (0, 1):
        region.map(i * GRANULE, pages[i])
    view = region.view(0, (2, GRANULE // 4), torch.float32)
    view.fill_(7)
    del view
    assert region.view(GRANULE, (4,), torch.float32).tolist() == [7] * 4
    pool.give(region.close())
    pool.close()


@pytest.mark.parametrize("region", [1, 2, 3])
def test_a_kv_page_is_mapped_in_all_regions_or_in_none(region):
    pool, driver = elastic(15)
    kv = VirtualKVCacheRegions(pool, LAYOUT)
    pages = pool.take(3)
    driver.fault = fail_nth("map", region)
    with pytest.raises(PlatformError):
        kv.map(LAYOUT.offset_of(2), pages)
    assert not driver.mapped
    kv.map(LAYOUT.offset_of(2), pages)
    assert len(driver.mapped) == 3
    kv.check_integrity()
    assert kv.unmap(LAYOUT.offset_of(2)) == pages


def test_rule_56_physical_offsets_are_those_of_the_pool():
    pool, _ = elastic(15)
    kv = VirtualKVCacheRegions(pool, LAYOUT)
    pool.take(4)
    kv.map(LAYOUT.offset_of(1), pool.take(3))
    assert kv.physical_offsets(LAYOUT.offset_of(1)) == [4 * GRANULE, 5 * GRANULE, 6 * GRANULE]


def test_rules_46_and_47_only_what_is_resident_is_leased_and_stays_until_the_last_lease_ends():
    with pytest.raises(NotResident, match="turn vmm_elastic off"):
        SharedPhysicalPageMapping(elastic()[0]).lease()
    driver = BookDriver()
    pool = PhysicalPagePool(driver, GRANULE, 4, elastic=False)
    mapping = SharedPhysicalPageMapping(pool)
    first, second = mapping.lease(), mapping.lease()
    assert [driver.mapped[first.address + mapping.offset_of(page)] for page in range(4)] == [
        pool.handle(page) for page in range(4)]
    first.close()
    first.close()  # twice is once
    assert len(driver.mapped) == 4
    second.close()
    assert not driver.mapped
    assert not driver.ranges


def test_a_lease_that_fails_leaves_nothing_mapped():
    driver = BookDriver()
    mapping = SharedPhysicalPageMapping(PhysicalPagePool(driver, GRANULE, 4, elastic=False))
    driver.fault = fail_nth("map", 3)
    with pytest.raises(PlatformError):
        mapping.lease()
    assert not driver.mapped
    assert mapping.num_leases == 0


def test_rule_7_and_49_one_ledger_for_all_owners_all_or_nothing():
    budget = WorkerPhysicalPageBudget(num_slots=10, active=6)
    budget.reserve({"weights": 4})
    with pytest.raises(LedgerFull):
        budget.reserve({"weights": 1, "kv": 2})
    assert (budget.reserved("weights"), budget.reserved("kv")) == (4, 0)
    budget.reserve({"weights": 1, "kv": 1})
    budget.release("weights", 5)
    budget.reserve({"kv": 5})
    budget.check_integrity()


def test_rule_24_slots_become_active_as_growth_allows():
    budget = WorkerPhysicalPageBudget(num_slots=10, active=2)
    with pytest.raises(LedgerFull):
        budget.reserve({"kv": 3})
    budget.activate(5)
    budget.reserve({"kv": 3})
    budget.activate(1)
    assert budget.active == 5, "never fewer than before"
    budget.activate(50)
    assert budget.active == 10
