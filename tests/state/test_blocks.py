"""Block pool, prefix cache and block manager as one hypothesis state machine, and their rules one by one."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from xllm_npu.state.batch_table import PREFILL, BatchTable
from xllm_npu.state.kv_cache.block_manager import BlockManager
from xllm_npu.state.kv_cache.block_pool import BlockPool, OutOfBlocks

SIZE, ROWS, LENGTH = 4, 5, 48


class BlocksMachine(RuleBasedStateMachine):
    """Rows grow, fork, write, are indexed and freed; a model memory tells what every block should contain.

    `memory[block][offset]` is the prefix (a tuple) that was written there. A row's blocks must always hold its own
    prefix, and whatever the prefix cache offers must hold exactly the prompt it was asked for.
    """

    @initialize(num_blocks=st.integers(8, 24), enabled=st.booleans())
    def start(self, num_blocks, enabled):
        self.table = BatchTable(ROWS, LENGTH, LENGTH // SIZE)
        self.manager = BlockManager(
            self.table, self.make_pool(num_blocks), SIZE, prefix_seed=1, enable_prefix_cache=enabled)
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.chains: dict[int, list[bytes]] = {}
        self.root = self.manager.prefix.root("")

    def make_pool(self, num_blocks):
        return BlockPool(num_blocks)

    def write(self, row, begin, end):
        """KV of positions begin..end-1, into blocks that only this row may hold."""
        for p in range(begin, end):
            block = int(self.table.block_table[row, p // SIZE])
            assert self.manager.pool.ref_count[block] == 1, "a shared block is written"
            self.memory[block, p % SIZE] = tuple(self.tokens[row][: p + 1])

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, prompt):
        if not self.table.num_free_rows:
            return
        tokens, chain = np.array(prompt, np.int32), []
        self.manager.prefix.extend_chain(chain, self.root, tokens, len(prompt))
        hits, unreferenced = self.manager.peek_prefix(chain, tokens)
        if self.manager.blocks_for(len(prompt)) - hits > self.manager.num_available - unreferenced:
            return
        row = self.table.take_row()
        self.table.phase[row] = PREFILL
        self.table.token_ids[row, : len(prompt)] = tokens
        cached = self.manager.take_prefix(row, chain, tokens)
        assert cached == hits * SIZE < len(prompt)
        self.tokens[row], self.chains[row] = list(prompt), chain
        self.manager.grow(row, len(prompt))
        self.write(row, cached, len(prompt))
        self.manager.index_blocks(row, chain, hits, len(prompt) // SIZE)

    def rows(self):
        return sorted(self.tokens)

    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data, token):
        if not self.tokens:
            return
        row = data.draw(st.sampled_from(self.rows()))
        position = len(self.tokens[row])
        if position >= LENGTH or self.manager.num_available == 0:
            return
        if self.manager.is_shared(row, position):
            source, target = self.manager.make_writable(row, position)
            for offset in range(SIZE):
                self.memory[target, offset] = self.memory.get((source, offset), ())
        self.manager.grow(row, position + 1)
        self.tokens[row].append(token)
        self.table.token_ids[row, position] = token
        self.write(row, position, position + 1)

    @rule(data=st.data())
    def fork(self, data):
        if not self.tokens or not self.table.num_free_rows:
            return
        source = data.draw(st.sampled_from(self.rows()))
        row = self.table.take_row()
        self.table.phase[row] = PREFILL
        self.manager.fork(source, row)
        self.tokens[row], self.chains[row] = self.tokens[source].copy(), self.chains[source].copy()
        self.table.token_ids[row] = self.table.token_ids[source]

    @rule(data=st.data(), indexed=st.booleans())
    def free(self, data, indexed):
        if not self.tokens:
            return
        row = data.draw(st.sampled_from(self.rows()))
        tokens, chain = self.tokens.pop(row), self.chains.pop(row)
        if indexed:
            first = len(chain)
            self.manager.prefix.extend_chain(chain, self.root, self.table.token_ids[row], len(tokens))
            self.manager.index_blocks(row, chain, first, len(chain))
        self.manager.free(row)
        self.table.give_row(row)

    @rule()
    def reset(self):
        self.manager.prefix.reset()

    @invariant()
    def agrees(self):
        if not hasattr(self, "manager"):
            return
        self.table.check_integrity()
        self.manager.check_integrity()
        for row, tokens in self.tokens.items():
            for p in range(len(tokens)):
                block = int(self.table.block_table[row, p // SIZE])
                assert self.memory[block, p % SIZE] == tuple(tokens[: p + 1]), f"row {row} position {p} is stale"

    def teardown(self):
        if hasattr(self, "manager"):
            for row in self.rows():
                self.manager.free(row)
            assert self.manager.pool.num_used == 0


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


def test_least_recently_freed_content_goes_first():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for i, block in enumerate(blocks):
        pool.index(block, bytes([i]))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    assert pool.allocate() == blocks[1]
    assert pool.lookup(bytes([1])) is None
    assert pool.lookup(bytes([0])) == blocks[0]


def test_empty_blocks_go_before_cached_ones():
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.index(first, b"x")
    pool.release(first)
    pool.release(second)
    assert pool.allocate() != first
    assert pool.allocate() != first
    assert pool.lookup(b"x") == first


def test_running_out_is_an_error_of_the_caller():
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(OutOfBlocks):
        pool.allocate()


@pytest.mark.parametrize("damage", ["leak", "twice", "dummy"])
def test_check_integrity_finds_damage(damage):
    pool = BlockPool(4)
    block = pool.allocate()
    if damage == "leak":
        pool.ref_count[block] = 0
    elif damage == "twice":
        pool._empty.append(pool._empty[0])
    else:
        pool.ref_count[0] = 0
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_a_collision_of_hashes_is_not_a_hit():
    table = BatchTable(2, 16, 4)
    manager = BlockManager(table, BlockPool(8), SIZE, prefix_seed=1, enable_prefix_cache=True)
    row = table.take_row()
    table.token_ids[row, :5] = [1, 2, 3, 4, 5]
    manager.grow(row, 5)
    manager.index_blocks(row, [b"same digest....."], 0, 1)
    assert manager.peek_prefix([b"same digest....."], np.array([1, 2, 3, 4, 5], np.int32))[0] == 1
    assert manager.peek_prefix([b"same digest....."], np.array([9, 2, 3, 4, 5], np.int32))[0] == 0


def test_the_whole_prompt_is_never_a_hit():
    table = BatchTable(2, 16, 4)
    manager = BlockManager(table, BlockPool(8), SIZE, prefix_seed=1, enable_prefix_cache=True)
    tokens, chain = np.arange(8, dtype=np.int32), []
    manager.prefix.extend_chain(chain, manager.prefix.root(""), tokens, 8)
    row = table.take_row()
    table.token_ids[row, :8] = tokens
    manager.grow(row, 8)
    manager.index_blocks(row, chain, 0, 2)
    assert manager.peek_prefix(chain, tokens)[0] == 1, "the last token must be left to compute"


def test_chains_depend_on_salt_seed_and_every_token_before():
    def chain(salt="", seed=1, tokens=range(12)):
        manager = BlockManager(BatchTable(1, 16, 4), BlockPool(8), SIZE, prefix_seed=seed, enable_prefix_cache=True)
        found: list[bytes] = []
        manager.prefix.extend_chain(found, manager.prefix.root(salt), np.array(tokens, np.int32), 12)
        return found

    assert chain() == chain()
    for other in (chain(salt="a"), chain(seed=2), chain(tokens=[99, *range(1, 12)])):
        assert all(a != b for a, b in zip(chain(), other))
    assert chain()[:2] == chain(tokens=[*range(11), 99])[:2]
