"""Blocks of rows: prefix hits, growth, forks with copy-on-write, release.

Works on `BatchTable` rows over one `BlockPool` and one `PrefixCache`. Block i of a row holds the KV of positions
i*block_size to (i+1)*block_size-1. A block that more than one row references is never written: the writer gets a
copy first. Does not decide who gets blocks, nor when a row's blocks may be freed: the scheduler does.
"""

from __future__ import annotations

import numpy as np

from xllm_npu.state.batch_table import FREE, BatchTable
from xllm_npu.state.kv_cache.block_hashes import Tokens
from xllm_npu.state.kv_cache.block_pool import DUMMY_BLOCK, BlockPool
from xllm_npu.state.kv_cache.prefix_cache import PrefixCache


class BlockManager:
    def __init__(
        self, table: BatchTable, pool: BlockPool, block_size: int, *, prefix_seed: int, enable_prefix_cache: bool
    ) -> None:
        self.table = table
        self.block_size = block_size
        self.pool = pool
        self.prefix = PrefixCache(self.pool, block_size, prefix_seed, enable_prefix_cache)

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    @property
    def capacity(self) -> int:
        return self.pool.capacity

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Prefix

    def take_prefix(self, row: int, chain: list[bytes], tokens: Tokens) -> int:
        """Give an empty row the cached blocks of its prompt; returns the tokens they cover.

        At least one token is left to compute, since the last position's logits are wanted.
        """
        table = self.table
        assert table.num_blocks[row] == 0
        blocks = self.prefix.match(chain, tokens, (len(tokens) - 1) // self.block_size)
        for block in blocks:
            self.pool.acquire(block)
        table.block_table[row, : len(blocks)] = blocks
        table.num_blocks[row] = len(blocks)
        return len(blocks) * self.block_size

    def peek_prefix(self, chain: list[bytes], tokens: Tokens) -> tuple[int, int]:
        """(blocks that would hit, how many of those are not referenced and so cost availability)."""
        blocks = self.prefix.match(chain, tokens, (len(tokens) - 1) // self.block_size)
        return len(blocks), sum(self.pool.is_cached_only(b) for b in blocks)

    def index_blocks(self, row: int, chain: list[bytes], first: int, last: int) -> None:
        """Make blocks first..last-1 of the row findable; their tokens are known and their KV is (being) written."""
        table, size = self.table, self.block_size
        for i in range(first, min(last, len(chain))):
            tokens = table.token_ids[row, i * size : (i + 1) * size]
            self.prefix.index(int(table.block_table[row, i]), chain[i], tokens)

    # Growth

    def missing_blocks(self, row: int, num_tokens: int) -> int:
        """Blocks the row lacks to hold `num_tokens` positions."""
        return max(0, self.blocks_for(num_tokens) - int(self.table.num_blocks[row]))

    def make_room(self, count: int) -> int:
        """How many of `count` blocks can certainly be had: `num_available` may promise more than memory holds."""
        return self.pool.make_room(count)

    def grow(self, row: int, num_tokens: int) -> None:
        """Give the row blocks for `num_tokens` positions; the caller made room."""
        table = self.table
        have = int(table.num_blocks[row])
        want = self.blocks_for(num_tokens)
        for i in range(have, want):
            table.block_table[row, i] = self.pool.allocate()
        table.num_blocks[row] = max(have, want)

    # Fork and copy-on-write

    def fork(self, source: int, target: int) -> None:
        """The empty row `target` shares every block of `source`."""
        table = self.table
        assert table.num_blocks[target] == 0
        count = int(table.num_blocks[source])
        table.block_table[target, :count] = table.block_table[source, :count]
        table.num_blocks[target] = count
        for block in table.block_table[source, :count].tolist():
            self.pool.acquire(block)

    def is_shared(self, row: int, position: int) -> bool:
        """Whether writing this position needs a copy of its block first."""
        index = position // self.block_size
        if index >= self.table.num_blocks[row]:
            return False
        return bool(self.pool.ref_count[self.table.block_table[row, index]] > 1)

    def make_writable(self, row: int, position: int) -> tuple[int, int]:
        """Replace the shared block at `position` by a fresh one; returns (source, destination) to copy."""
        index = position // self.block_size
        source = int(self.table.block_table[row, index])
        target = self.pool.allocate()
        self.table.block_table[row, index] = target
        self.pool.release(source)
        return source, target

    # Release

    def free(self, row: int) -> None:
        """Release every block, the last first, so that the beginning of a prompt stays cached longest."""
        table = self.table
        count = int(table.num_blocks[row])
        for block in reversed(table.block_table[row, :count].tolist()):
            self.pool.release(block)
        table.block_table[row, :count] = DUMMY_BLOCK
        table.num_blocks[row] = 0

    def check_integrity(self) -> None:
        """Assert that reference counts equal what the rows hold and that no row holds a block twice."""
        self.pool.check_integrity()
        self.prefix.check_integrity()
        table = self.table
        held = np.zeros(self.pool.num_blocks, np.int64)
        held[DUMMY_BLOCK] = 1
        for row in range(table.num_rows):
            count = int(table.num_blocks[row])
            blocks = table.block_table[row, :count]
            assert not (table.block_table[row, count:] != DUMMY_BLOCK).any(), f"row {row}: stale block table entries"
            if table.phase[row] == FREE:
                assert count == 0, f"free row {row} holds blocks"
            assert len(np.unique(blocks)) == count, f"row {row} holds a block twice"
            assert not (blocks == DUMMY_BLOCK).any(), f"row {row} holds the dummy block"
            np.add.at(held, blocks, 1)
        wrong = np.flatnonzero(held != self.pool.ref_count)
        assert wrong.size == 0, f"blocks {wrong.tolist()}: references {self.pool.ref_count[wrong]} held {held[wrong]}"
