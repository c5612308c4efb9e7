"""The names of full blocks: chained hashes of token ids.

The hash of a block is xxh3-128(hash of the block before it || its token ids as int32), seeded; the chain starts from
a root that depends on the request's salt, so that requests with different salts never share.
Format: the same chain as the reference system (xxh3-128, seed 1024 by default).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Tokens = npt.NDArray[np.int32]


class BlockHashes:
    def __init__(self, block_size: int, seed: int) -> None:
        self.block_size = block_size
        self._seed = seed

    def root(self, salt: str, second: bool = False, lora_id: int = 0) -> bytes:
        """`second`: of sequences whose keys are rotated otherwise. Those, and those of each adapter, share nothing
        with the rest.
        """
        adapter = b"\xfe" + lora_id.to_bytes(8, "little") if lora_id else b""
        return xxhash.xxh3_128_digest(  # 0xfe and 0xff are in no UTF-8
            salt.encode() + b"\xff" * second + adapter, seed=self._seed)

    def extend_chain(self, chain: list[bytes], root: bytes, tokens: Tokens, num_tokens: int) -> None:
        """Append the hashes of the full blocks of tokens[:num_tokens] that `chain` does not have yet."""
        size = self.block_size
        for start in range(len(chain) * size, num_tokens - size + 1, size):
            parent = chain[-1] if chain else root
            chain.append(xxhash.xxh3_128_digest(parent + tokens[start : start + size].tobytes(), seed=self._seed))
