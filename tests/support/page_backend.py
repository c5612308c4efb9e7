"""A `KVCachePageBackend` of plain sets: what is mapped, how much may be, and growth that fails on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageGrowthRefused
from xllm_npu.state.kv_cache.page_layout import PageLayout


class ScriptedBackend:
    def __init__(self, layout: PageLayout, most: int | None = None) -> None:
        """`most`: pages that may be mapped at once; `before_map` is called first and may raise or wait."""
        self.layout = layout
        self.most = layout.num_pages if most is None else most
        self.mapped = {layout.offset_of(PINNED_PAGE)}
        self.calls: list[tuple[str, list[int]]] = []
        self.before_map: Callable[[], None] = lambda: None

    def growable_pages(self) -> int:
        return max(0, self.most - len(self.mapped))

    def map(self, offsets: Sequence[int]) -> None:
        self.before_map()
        self.calls.append(("map", list(offsets)))
        assert not self.mapped & set(offsets), "a page is mapped twice"
        if len(self.mapped) + len(offsets) > self.most:
            raise PageGrowthRefused("memory", "as the test says")
        self.mapped.update(offsets)

    def unmap(self, offsets: Sequence[int]) -> None:
        self.calls.append(("unmap", list(offsets)))
        assert self.mapped >= set(offsets), "a page that is not mapped is unmapped"
        self.mapped.difference_update(offsets)

    def is_mapped(self, block: int) -> bool:
        return self.layout.offset_of(self.layout.page_of(block)) in self.mapped


def small_layout(num_pages: int, blocks_per_page: int, block_bytes: int = 64) -> PageLayout:
    return PageLayout(
        page_bytes=blocks_per_page * block_bytes, block_bytes=block_bytes, num_pages=num_pages, num_regions=4)
