"""Where blocks lie in virtual pages: plain arithmetic, no memory.

Every K and every V of a layer (or a layer's latents) is a region of its own; block b begins at b * block_bytes of each
region, and virtual page p is the bytes from p * page_bytes on, of all regions alike. A block that two pages share is
never handed out, so that a page is live exactly as long as a block of its own is.
"""

from __future__ import annotations

import msgspec

_LITTLE_WASTE = 8  # blocks in a page, of which one may lie between two


class PageLayout(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """Bytes are of one region. A block is at most a page."""

    page_bytes: int
    block_bytes: int
    num_pages: int
    num_regions: int  # a virtual page takes so many physical ones

    @property
    def num_block_ids(self) -> int:
        """Blocks that the regions have room for, those between two pages included."""
        return self.num_pages * self.page_bytes // self.block_bytes

    @property
    def num_whole_blocks(self) -> int:
        """Blocks that lie in one page, the dummy included."""
        return sum(len(self.blocks_of(page)) for page in range(self.num_pages))

    @property
    def region_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def total_page_bytes(self) -> int:
        """Of one virtual page, over all regions."""
        return self.page_bytes * self.num_regions

    @property
    def blocks_per_page(self) -> int:
        """Blocks that every page has at least."""
        whole, rest = divmod(self.page_bytes, self.block_bytes)
        return whole - 1 if rest else whole

    def blocks_of(self, page: int) -> range:
        """The blocks that lie whole in the page."""
        return range(-(-page * self.page_bytes // self.block_bytes), (page + 1) * self.page_bytes // self.block_bytes)

    def page_of(self, block: int) -> int:
        """The page that a block of `blocks_of` lies in."""
        return block * self.block_bytes // self.page_bytes

    def offset_of(self, page: int) -> int:
        """Bytes from a region's beginning."""
        return page * self.page_bytes


def page_layout(
    *, page_bytes: int, granularity: int, block_bytes: int, num_regions: int, budget: int, most_blocks: int
) -> PageLayout:
    """The layout of at most `budget` bytes over all regions, with no more pages than `most_blocks` blocks need.

    Pages are multiples of `granularity`, at least `page_bytes`, and so large that blocks between pages waste little.
    """
    size = -(-max(page_bytes, block_bytes) // granularity) * granularity
    while size % block_bytes and size < _LITTLE_WASTE * block_bytes:
        size += granularity
    probe = PageLayout(page_bytes=size, block_bytes=block_bytes, num_pages=1, num_regions=num_regions)
    wanted = -(-most_blocks // probe.blocks_per_page)
    return msgspec.structs.replace(probe, num_pages=max(0, min(budget // probe.total_page_bytes, wanted)))
