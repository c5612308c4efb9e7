"""How far pages may grow: the rules about ceilings, free memory and headroom, each by its number."""

from __future__ import annotations

import pytest
from xllm_platform.base import AllocatorStats, MemoryInfo

from xllm_npu.memory.growth import GrowthLimits, GrowthRule
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused

GIB = 2**30


class Device:
    def __init__(self, free: int, total: int = 100 * GIB) -> None:
        self.free, self.total = free, total
        self.stats = AllocatorStats()

    def rule(self, sharers: int = 1, **limits) -> GrowthRule:
        return GrowthRule(GrowthLimits(total_bytes=self.total // sharers, **limits),
                          lambda: MemoryInfo(self.free, self.total), lambda: self.stats, sharers)


def test_rule_23_the_reservation_is_all_memory_clipped_by_what_was_set():
    assert GrowthLimits(total_bytes=100).reservation_bytes == 100
    assert GrowthLimits(total_bytes=100, ratio=0.7).reservation_bytes == 70
    assert GrowthLimits(total_bytes=100, max_bytes=30).reservation_bytes == 30
    assert GrowthLimits(total_bytes=100, ratio=0.2, max_bytes=30).reservation_bytes == 20


def test_rule_22_ceilings_stop_growth():
    device = Device(free=90 * GIB)
    rule = device.rule(max_bytes=10 * GIB)
    assert rule.growable_bytes(committed=4 * GIB) == 6 * GIB
    rule.check(6 * GIB, committed=4 * GIB)
    with pytest.raises(PageGrowthRefused, match="ceiling") as caught:
        rule.check(6 * GIB + 1, committed=4 * GIB)
    assert caught.value.reason == "ceiling"


def test_rules_26_and_27_without_ceilings_free_memory_is_the_limit():
    assert Device(free=90 * GIB).rule(ratio=0, max_bytes=0).growable_bytes(0) == 90 * GIB


def test_rule_28_every_growth_looks_at_memory_that_is_free_now():
    device = Device(free=50 * GIB)
    rule = device.rule(ratio=0.75, reserve_bytes=2 * GIB)
    assert rule.growable_bytes(0) == 23 * GIB  # the ratio keeps 25 free, the reserve 2
    device.free = 35 * GIB
    with pytest.raises(PageGrowthRefused, match="too little memory"):
        rule.check(9 * GIB, committed=0)
    rule.check(8 * GIB, committed=0)


def test_rule_29_memory_that_others_free_allows_growth():
    device = Device(free=5 * GIB)
    device.stats = AllocatorStats(reserved=GIB, peak_reserved=GIB)
    rule = device.rule()
    assert rule.growable_bytes(0) == 5 * GIB
    device.free = 60 * GIB
    assert rule.growable_bytes(0) == 60 * GIB


def test_rule_32_headroom_is_the_peak_less_the_present_reservation_and_the_reserve():
    device = Device(free=50 * GIB)
    device.stats = AllocatorStats(reserved=3 * GIB, peak_reserved=10 * GIB)
    assert device.rule(reserve_bytes=GIB).growable_bytes(0) == (50 - 7 - 1) * GIB


def test_rule_33_what_the_allocator_holds_is_not_charged_twice_and_what_it_released_keeps_room():
    device = Device(free=40 * GIB)
    device.stats = AllocatorStats(reserved=10 * GIB, peak_reserved=10 * GIB)
    rule = device.rule()
    assert rule.growable_bytes(0) == 40 * GIB
    device.stats, device.free = AllocatorStats(reserved=2 * GIB, peak_reserved=10 * GIB), 48 * GIB
    assert rule.growable_bytes(0) == 40 * GIB


def test_rule_34_a_later_larger_peak_raises_the_reserve():
    device = Device(free=40 * GIB)
    device.stats = AllocatorStats(reserved=GIB, peak_reserved=2 * GIB)
    rule = device.rule()
    assert rule.growable_bytes(0) == 39 * GIB
    device.free = 80 * GIB  # others went
    device.stats = AllocatorStats(reserved=GIB, peak_reserved=20 * GIB)
    assert rule.growable_bytes(0) == 61 * GIB


def test_rule_35_peaks_survive_a_reset_of_the_statistics():
    device = Device(free=40 * GIB)
    device.stats = AllocatorStats(reserved=8 * GIB, peak_reserved=9 * GIB)
    rule = device.rule()
    rule.growable_bytes(0)
    device.stats = AllocatorStats(reserved=GIB, peak_reserved=GIB)
    assert rule.growable_bytes(0) == 32 * GIB


def test_rule_36_without_statistics_the_least_that_was_free_beside_the_pages_counts():
    device = Device(free=40 * GIB)
    rule = device.rule()
    assert rule.growable_bytes(0) == 40 * GIB
    device.free = 30 * GIB - 5 * GIB  # a step took 10, and pages 5
    assert rule.growable_bytes(5 * GIB) == 25 * GIB
    device.free = 40 * GIB - 5 * GIB  # the step has ended
    assert rule.growable_bytes(5 * GIB) == 25 * GIB


def test_rule_37_the_reserve_counts_before_anything_ran():
    assert Device(free=10 * GIB).rule(reserve_bytes=4 * GIB).growable_bytes(0) == 6 * GIB


def test_ranks_of_one_memory_share_what_is_free():
    device = Device(free=40 * GIB)
    rule = device.rule(sharers=2)
    assert rule.growable_bytes(0) == 20 * GIB
    device.free = 20 * GIB  # both have grown by 10
    assert rule.growable_bytes(10 * GIB) == 10 * GIB
