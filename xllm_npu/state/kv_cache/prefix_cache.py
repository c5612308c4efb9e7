"""Finding blocks whose content a new prompt can reuse, by the hashes of block_hashes.py.

Because xxh3 is fast but not collision-resistant against an adversary, a hit also compares the block's own token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from xllm_npu.state.kv_cache.block_hashes import BlockHashes, Tokens
from xllm_npu.state.kv_cache.block_pool import BlockPool


@dataclass(slots=True)
class PrefixStats:
    """Counters since start, in tokens."""

    queries: int = 0
    hits: int = 0


class PrefixCache:
    """The index over one `BlockPool`. With `enabled` false nothing is ever found or kept."""

    def __init__(self, pool: BlockPool, block_size: int, seed: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.stats = PrefixStats()
        hashes = BlockHashes(block_size, seed)
        self.root, self.extend_chain = hashes.root, hashes.extend_chain
        self._tokens: dict[bytes, bytes] = {}  # digest -> the block's token ids, for the comparison on a hit

    def match(self, chain: list[bytes], tokens: Tokens, limit: int) -> list[int]:
        """Blocks for the longest indexed prefix, at most `limit` blocks; takes no reference."""
        blocks: list[int] = []
        if not self.enabled:
            return blocks
        size = self.block_size
        for i, digest in enumerate(chain[:limit]):
            block = self.pool.lookup(digest)
            if block is None or self._tokens.get(digest) != tokens[i * size : (i + 1) * size].tobytes():
                break
            blocks.append(block)
        return blocks

    def count(self, queried_tokens: int, hit_tokens: int) -> None:
        self.stats.queries += queried_tokens
        self.stats.hits += hit_tokens

    def index(self, block: int, digest: bytes, tokens: Tokens) -> None:
        """Make a full block findable; `tokens` are its own block_size token ids."""
        if self.enabled and self.pool.index(block, digest):
            self._tokens[digest] = tokens.tobytes()
            if len(self._tokens) > 2 * self.pool.num_indexed + 1024:  # evictions leave entries behind
                self._tokens = {d: t for d, t in self._tokens.items() if self.pool.lookup(d) is not None}

    def reset(self) -> int:
        """Forget everything (weights changed); returns the number of blocks forgotten."""
        self._tokens.clear()
        return self.pool.drop_index()

    def check_integrity(self) -> None:
        for digest in self.pool._block_of:
            assert digest in self._tokens, "an indexed block has no token ids"
            assert len(self._tokens[digest]) == 4 * self.block_size
