"""Which blocks lie in which virtual page."""

from __future__ import annotations

import pytest

from xllm_npu.state.kv_cache.page_layout import PageLayout, page_layout

MIB = 2**20


def layout(**changes) -> PageLayout:
    values = {"page_bytes": 2 * MIB, "granularity": 4096, "block_bytes": 64 * 1024, "num_regions": 60,
              "budget": 2**40, "most_blocks": 1000}
    return page_layout(**{**values, **changes})


@pytest.mark.parametrize(("page", "block"), [
    (4096, 4096), (4096, 512), (4096, 768), (8192, 3 * 1024), (12288, 4096 * 3)])
def test_blocks_lie_whole_in_their_page(page, block):
    made = PageLayout(page_bytes=page, block_bytes=block, num_pages=37, num_regions=2)
    seen: set[int] = set()
    for p in range(37):
        blocks = made.blocks_of(p)
        assert len(blocks) >= made.blocks_per_page
        for b in blocks:
            assert p * page <= b * block < (b + 1) * block <= (p + 1) * page
            assert made.page_of(b) == p
        assert not seen & set(blocks)
        seen |= set(blocks)
    assert max(seen) < made.num_block_ids
    assert 0 in made.blocks_of(0)


def test_pages_are_multiples_of_the_granularity_that_waste_little():
    assert layout().page_bytes == 2 * MIB
    assert layout(block_bytes=3 * MIB // 2, granularity=2 * MIB).page_bytes == 6 * MIB  # four whole blocks
    large = layout(block_bytes=5 * MIB + 4096, granularity=2 * MIB)
    assert large.page_bytes % (2 * MIB) == 0
    assert large.blocks_per_page * large.block_bytes >= 0.8 * large.page_bytes


def test_no_more_pages_than_budget_or_blocks_need():
    assert layout(budget=60 * 2 * MIB * 3 + 1).num_pages == 3
    assert layout(most_blocks=65).num_pages == 3  # of 32 blocks each
    assert layout(budget=1000).num_pages == 0


def test_rule_53_offsets_are_page_ids_times_the_page_size():
    assert [layout().offset_of(page) for page in range(3)] == [0, 2 * MIB, 4 * MIB]
