"""Which KV blocks exist, who holds them, and which content is worth keeping.

A block is in exactly one of four places: the dummy (block 0, where padded rows write), referenced by sequences,
free and empty, or free but cached (its content is still indexed by hash and may be taken again). Allocation takes
empty blocks first, then the least recently freed cached one. Knows block ids and hashes; no tokens, bytes or device.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from xllm_npu.state.kv_cache.page_allocator import PageStats

DUMMY_BLOCK = 0


class OutOfBlocks(RuntimeError):
    """Programmer's error: callers check `num_available` first."""


class BlockPool:
    """`num_blocks` counts the dummy, so num_blocks - 1 can be handed out."""

    elastic = False  # whether what is available depends on others too, who use the same memory

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the dummy and one block"
        self.num_blocks = num_blocks
        self.ref_count: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.ref_count[DUMMY_BLOCK] = 1
        self._empty = list(range(num_blocks - 1, 0, -1))  # a stack: low ids first, recently freed ids again first
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced but indexed; least recently freed first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that sequences reference."""
        return self.num_blocks - 1 - self.num_available

    @property
    def capacity(self) -> int:
        """Blocks that there could be now, used ones included."""
        return self.num_blocks - 1

    @property
    def most_blocks(self) -> int:
        """Blocks that there could ever be."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        return self.num_used / max(1, self.capacity)

    @property
    def num_indexed(self) -> int:
        return len(self._hash_of)

    def make_room(self, count: int) -> int:
        """How many of `count` blocks `allocate` will certainly give."""
        return min(count, self.num_available)

    def begin_step(self, step_id: int) -> None:
        """Blocks that are released from now on may be used by steps up to this one."""

    def settle(self, completed_step: int, in_flight: bool) -> None:
        """Steps up to this one have ended, and all of them if none is in flight."""

    def check(self) -> None:
        """Raise what has made the memory of blocks unusable."""

    def freeze(self) -> None:
        """No block is referenced or cached: none has memory afterwards but the dummy, and none can be had."""

    def thaw(self) -> None:
        """The end of `freeze`."""

    def page_stats(self) -> PageStats | None:
        """Of the pages that blocks lie in, where those come and go."""
        return None

    def close(self) -> None:
        """Nothing is allocated any more."""

    def allocate(self) -> int:
        """One block with a reference count of 1 and no hash."""
        if self._empty:
            block = self._empty.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise OutOfBlocks("allocate() without an available block")
        self.ref_count[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more reference to a block that is referenced or cached."""
        if self.ref_count[block] == 0:
            del self._cached[block]
        self.ref_count[block] += 1

    def release(self, block: int) -> None:
        """One reference less; at zero the block becomes cached if it has a hash, else empty."""
        count = self.ref_count[block] - 1
        assert count >= 0, f"block {block} released too often"
        self.ref_count[block] = count
        if count == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def index(self, block: int, digest: bytes) -> bool:
        """Make a referenced block findable by its hash. False if that content is already held by another block."""
        assert self.ref_count[block] > 0
        if digest in self._block_of or block in self._hash_of:
            return False
        self._hash_of[block] = digest
        self._block_of[digest] = block
        return True

    def lookup(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def is_cached_only(self, block: int) -> bool:
        """No sequence references it; taking it lowers `num_available`."""
        return bool(self.ref_count[block] == 0)

    def drop_index(self) -> int:
        """Forget every hash (weights changed); returns how many. References stay."""
        count = len(self._hash_of)
        self._empty.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()
        return count

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place and that the index is one-to-one."""
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is twice on the empty list"
        assert not empty & cached, "a block is both empty and cached"
        for block in range(1, self.num_blocks):
            free = block in empty or block in cached
            count = self.ref_count[block]
            assert free == (count == 0), f"block {block}: free {free}, references {count}"
        assert self.ref_count[DUMMY_BLOCK] == 1, "the dummy block was taken or released"
        assert DUMMY_BLOCK not in empty | cached | set(self._hash_of)
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hash index is not one-to-one"
        assert cached <= set(self._hash_of), "a cached block has no hash"
        assert not empty & set(self._hash_of), "an empty block has a hash"
