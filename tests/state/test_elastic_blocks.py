"""The elastic block pool: the state machine of the ordinary one over pages that come and go, and its own rules."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule

from tests.state.test_blocks import BlocksMachine
from tests.support.page_backend import ScriptedBackend, small_layout
from xllm_npu.state.kv_cache.block_pool import OutOfBlocks
from xllm_npu.state.kv_cache.elastic_block_pool import ElasticBlockPool
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageAllocator
from xllm_npu.state.kv_cache.page_layout import PageLayout


def make(layout: PageLayout, most: int | None = None) -> tuple[ElasticBlockPool, ScriptedBackend]:
    backend = ScriptedBackend(layout, most)
    return ElasticBlockPool(PageAllocator(layout, backend, preallocate=False)), backend


class ElasticBlocksMachine(BlocksMachine):
    """Blocks of 64 bytes in pages of 160 or 256, so that some blocks lie between pages and are never seen."""

    def make_pool(self, num_blocks):
        page_bytes = 256 if num_blocks % 2 else 160
        layout = PageLayout(page_bytes=page_bytes, block_bytes=64, num_pages=num_blocks // 2, num_regions=4)
        pool, self.backend = make(layout)
        self.step = 0
        return pool

    def write(self, row, begin, end):
        for position in range(begin, end):
            assert self.backend.is_mapped(int(self.table.block_table[row, position // 4]))
        super().write(row, begin, end)

    @rule(steps=st.integers(0, 2), in_flight=st.booleans())
    def time_passes(self, steps, in_flight):
        self.manager.pool.settle(self.step, in_flight)
        self.step += steps
        self.manager.pool.begin_step(self.step)

    @rule(most=st.integers(1, 12))
    def memory_changes(self, most):
        self.backend.most = min(most, self.backend.layout.num_pages)

    @invariant()
    def blocks_have_memory(self):
        if not hasattr(self, "backend"):
            return
        for row in self.tokens:
            for block in self.table.block_table[row, : self.table.num_blocks[row]].tolist():
                assert self.backend.is_mapped(block), f"block {block} of row {row} has no memory"
                assert block in self.backend.layout.blocks_of(self.backend.layout.page_of(block))

    def teardown(self):
        super().teardown()
        if hasattr(self, "backend"):
            self.manager.pool.settle(self.step, False)
            assert self.backend.mapped == {PINNED_PAGE}
            self.manager.check_integrity()


TestElasticBlocks = ElasticBlocksMachine.TestCase
TestElasticBlocks.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


def test_rule_18_a_page_goes_when_its_last_block_has_returned_and_no_step_uses_it():
    pool, backend = make(small_layout(8, 4))
    first = [pool.allocate() for _ in range(3)]  # the rest of the pinned page
    second = [pool.allocate() for _ in range(4)]
    assert len(backend.mapped) == 2
    pool.begin_step(7)
    for block in second:
        pool.release(block)
    pool.settle(6, in_flight=True)
    assert len(backend.mapped) == 2, "step 7 may still read it"
    pool.settle(7, in_flight=True)
    assert backend.mapped == {PINNED_PAGE}
    for block in first:
        pool.release(block)
    pool.settle(7, in_flight=False)
    assert backend.mapped == {PINNED_PAGE}


def test_a_page_that_is_used_again_stays():
    pool, backend = make(small_layout(8, 4))
    blocks = [pool.allocate() for _ in range(7)]
    pool.begin_step(3)
    for block in blocks[3:]:
        pool.release(block)
    again = pool.allocate()
    pool.settle(3, in_flight=False)
    assert backend.is_mapped(again)
    pool.check_integrity()


def test_what_is_cached_in_a_page_is_forgotten_with_it():
    pool, _ = make(small_layout(8, 4))
    kept, *_ = [pool.allocate() for _ in range(3)]
    gone = pool.allocate()
    pool.index(kept, b"kept")
    pool.index(gone, b"gone")
    for block in (kept, gone):
        pool.release(block)
    assert pool.lookup(b"gone") == gone
    pool.settle(0, in_flight=False)
    assert pool.lookup(b"gone") is None
    assert pool.lookup(b"kept") == kept, "the pinned page keeps its cached content"
    pool.check_integrity()


def test_cached_blocks_are_taken_before_memory_grows():
    pool, backend = make(small_layout(8, 4))
    blocks = [pool.allocate() for _ in range(3)]
    pool.index(blocks[0], b"x")
    pool.release(blocks[0])
    assert pool.allocate() == blocks[0]
    assert backend.mapped == {PINNED_PAGE}
    assert pool.lookup(b"x") is None


def test_blocks_of_low_pages_go_first():
    pool, _ = make(small_layout(8, 4))
    blocks = [pool.allocate() for _ in range(11)]
    for block in (blocks[8], blocks[1], blocks[5]):
        pool.release(block)
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[5], blocks[8]]


def test_availability_follows_live_memory():
    pool, backend = make(small_layout(8, 4), most=3)
    assert (pool.num_available, pool.capacity, pool.most_blocks) == (11, 11, 31)
    assert pool.make_room(20) == 11
    taken = [pool.allocate() for _ in range(11)]
    assert (pool.num_available, pool.num_used, pool.usage) == (0, 11, 1.0)
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    backend.most = 8
    assert pool.num_available == 20
    for block in taken:
        pool.release(block)
    pool.settle(-1, in_flight=False)
    pool.check_integrity()
