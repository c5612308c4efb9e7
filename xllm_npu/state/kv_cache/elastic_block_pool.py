"""A block pool whose pages of blocks come and go with demand.

Blocks lie in the virtual pages of a `PageAllocator`. A page is held while one of its blocks is referenced; when the
last one returns and the steps that may still use it have ended, its cached content is forgotten and the page goes back.
Allocation takes empty blocks of held pages first, low pages before high ones so that few are held; then the least
recently freed cached block; then a further page. Memory thus follows what sequences reference, not what is cached.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xllm_npu.state.kv_cache.block_pool import DUMMY_BLOCK, BlockPool, OutOfBlocks
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageAllocator, PageGrowthRefused, PageStats


@dataclass(slots=True)
class _HeldPage:
    empty: list[int]  # a stack
    live: int = 0  # referenced blocks
    idle_since: int = -1  # the last step that may use its blocks, while live is 0


class ElasticBlockPool(BlockPool):
    """`num_blocks` counts the ids, of which not all are backed, and those between two pages never."""

    elastic = True

    def __init__(self, pages: PageAllocator) -> None:
        self.pages = pages
        self.layout = pages.layout
        self.num_blocks = self.layout.num_block_ids
        self.ref_count: npt.NDArray[np.int32] = np.zeros(self.num_blocks, np.int32)
        self.ref_count[DUMMY_BLOCK] = 1
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._held: dict[int, _HeldPage] = {}
        self._open: list[int] = []  # a heap of held pages; those without empty blocks are dropped when found
        self._num_empty = self._num_used = 0
        self._idle: dict[int, None] = {}  # held pages without a referenced block
        self._step = -1
        self._hold(PINNED_PAGE)
        self._held[PINNED_PAGE].empty.remove(DUMMY_BLOCK)
        self._held[PINNED_PAGE].live = 1
        del self._idle[PINNED_PAGE]
        self._num_empty -= 1
        self._most_blocks = self.layout.num_whole_blocks - 1

    def _hold(self, page: int) -> None:
        blocks = self.layout.blocks_of(page)
        self._held[page] = _HeldPage(list(reversed(blocks)))
        self._num_empty += len(blocks)
        heapq.heappush(self._open, page)
        self._idle[page] = None  # until one of its blocks is allocated

    @property
    def _num_ready(self) -> int:
        """Blocks that can be had without a further page."""
        return self._num_empty + len(self._cached)

    @property
    def num_available(self) -> int:
        return self._num_ready + self.pages.num_available * self.layout.blocks_per_page

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def capacity(self) -> int:
        return self._num_used + self.num_available

    @property
    def most_blocks(self) -> int:
        return self._most_blocks

    def make_room(self, count: int) -> int:
        while self._num_ready < count and self.pages.num_available:  # else asking again would only take time
            try:
                self._hold(self.pages.take())
            except PageGrowthRefused:
                break
        return min(count, self._num_ready)

    def allocate(self) -> int:
        if not self.make_room(1):
            raise OutOfBlocks("allocate() without an available block")
        while self._open and not self._held_open(self._open[0]):
            heapq.heappop(self._open)
        if self._open:
            block = self._held[self._open[0]].empty.pop()
            self._num_empty -= 1
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._reference(block)
        return block

    def _held_open(self, page: int) -> bool:
        held = self._held.get(page)
        return held is not None and bool(held.empty)

    def _reference(self, block: int) -> None:
        self.ref_count[block] = 1
        self._num_used += 1
        page = self.layout.page_of(block)
        held = self._held[page]
        held.live += 1
        self._idle.pop(page, None)

    def acquire(self, block: int) -> None:
        if self.ref_count[block] == 0:
            del self._cached[block]
            self._reference(block)
        else:
            self.ref_count[block] += 1

    def release(self, block: int) -> None:
        count = self.ref_count[block] - 1
        assert count >= 0, f"block {block} released too often"
        self.ref_count[block] = count
        if count:
            return
        self._num_used -= 1
        page = self.layout.page_of(block)
        held = self._held[page]
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._empty_block(block)
        held.live -= 1
        if not held.live:
            held.idle_since = self._step
            self._idle[page] = None

    def _empty_block(self, block: int) -> None:
        page = self.layout.page_of(block)
        held = self._held[page]
        if not held.empty:
            heapq.heappush(self._open, page)
        held.empty.append(block)
        self._num_empty += 1

    def drop_index(self) -> int:
        count = len(self._hash_of)
        for block in self._cached:
            self._empty_block(block)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()
        return count

    def begin_step(self, step_id: int) -> None:
        self._step = step_id

    def settle(self, completed_step: int, in_flight: bool) -> None:
        """Pages whose last block has returned, and that no step in flight uses, go back."""
        if not self._idle:
            return
        gone = [page for page in self._idle if not in_flight or self._held[page].idle_since <= completed_step]
        for page in gone:
            for block in self.layout.blocks_of(page):
                if block in self._cached:
                    del self._cached[block]
                    self._forget(block)
                    self._empty_block(block)
            self._num_empty -= len(self._held.pop(page).empty)
            del self._idle[page]
        if gone:
            self.pages.give(gone)
            self._open = [page for page in self._held if self._held[page].empty]
            heapq.heapify(self._open)

    def check(self) -> None:
        self.pages.check()

    def freeze(self) -> None:
        assert not self._num_used, "blocks are referenced"
        assert not self._cached, "blocks are cached"
        self.pages.freeze()

    def thaw(self) -> None:
        self.pages.thaw()

    def page_stats(self) -> PageStats | None:
        return self.pages.stats()

    def close(self) -> None:
        self.pages.close()

    def check_integrity(self) -> None:
        """Assert that held pages, blocks and the index agree; costs O(blocks of held pages)."""
        self.pages.check_integrity()
        assert self._held.keys() == self.pages.taken, "pages are held that were not taken, or the other way round"
        assert self.ref_count[DUMMY_BLOCK] == 1, "the dummy block was taken or released"
        opened, num_empty, backed = set(self._open), 0, np.zeros(self.num_blocks, bool)
        for page, held in self._held.items():
            blocks = self.layout.blocks_of(page)
            backed[blocks.start : blocks.stop] = True
            empty = set(held.empty)
            num_empty += len(empty)
            assert len(empty) == len(held.empty), "a block is twice on an empty list"
            assert not held.empty or page in opened, f"page {page} has empty blocks and is not open"
            live = 0
            for block in blocks:
                free = (block in empty) + (block in self._cached)
                assert free == (self.ref_count[block] == 0), f"block {block}: {free} free places"
                live += not free
            assert live == held.live, f"page {page}: {held.live} counted, {live} live"
            assert (page in self._idle) == (live == 0)
        assert num_empty == self._num_empty
        assert not self.ref_count[~backed].any(), "a block without a page is referenced"
        assert int((self.ref_count > 0).sum()) - 1 == self._num_used
        assert all(backed[block] for block in self._hash_of), "a block without a page is in the index"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hash index is not one-to-one"
        assert set(self._cached) <= set(self._hash_of), "a cached block has no hash"
