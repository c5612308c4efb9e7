"""Which data-parallel rank gets a request: the one with the most room, or the one that has computed its beginning.

A rank's load is the larger of two shares: KV blocks that are taken or promised, and sequences out of those that run
at once. A request's blocks are promised from the moment it is sent until the rank's own figures contain them, so that
a burst does not fall on whoever looked empty. Above 1 requests wait there. Pure: knows no process, no clock.

With affinity the router remembers which prompt blocks it has sent where, as many as the rank's cache holds, least
recently sent forgotten first. That is a guess at the rank's prefix cache, and only the cost of a wrong one is at stake.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from xllm_npu.state.kv_cache.block_hashes import BlockHashes
from xllm_npu.state.messages import AddRequest


@dataclass(slots=True, frozen=True)
class Affinity:
    """When a cached beginning decides. Both thresholds are shares, 0 to 1."""

    match_threshold: float  # of the prompt's tokens that must be cached
    imbalance_threshold: float  # by which the rank may be fuller than the emptiest


@dataclass(slots=True)
class _Rank:
    num_blocks: int
    free_blocks: int  # as the rank last said
    promised: int = 0  # blocks of requests that those figures do not contain
    open: int = 0  # sequences sent that have not ended
    sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # block hashes, least recently sent first


@dataclass(slots=True)
class _Placed:
    rank: int
    promised: int
    sequences: int


class DpRouter:
    def __init__(
        self, num_blocks: Sequence[int], *, max_seqs: int, block_size: int, affinity: Affinity | None = None,
        prefix_seed: int = 0,
    ) -> None:
        """`num_blocks`: KV blocks of each rank that requests can use."""
        self._ranks = [_Rank(count, count) for count in num_blocks]
        self._max_seqs, self._block_size = max_seqs, block_size
        self._affinity = affinity if len(self._ranks) > 1 else None
        self._hashes = BlockHashes(block_size, prefix_seed)
        self._placed: dict[int, _Placed] = {}  # open requests
        self._turn = 0  # the rank that wins the next tie

    def place(self, request: AddRequest, rank: int | None = None) -> int:
        """Choose the rank that `request` is sent to, if the caller has not, and count it there until `end`."""
        chain = self._chain(request) if self._affinity else []
        if rank is None:
            rank = self._with_prefix(chain, len(request.prompt) // 4)
            if rank is None:
                rank = min(range(len(self._ranks)), key=self._order)
            self._turn = (rank + 1) % len(self._ranks)
        count = request.params.num_sequences
        blocks = len(request.prompt) // 4 // self._block_size + count  # each sequence writes a block of its own
        self._placed[request.request_id] = _Placed(rank, blocks, count)
        chosen = self._ranks[rank]
        chosen.promised += blocks
        chosen.open += count
        self._remember(chosen, chain)
        return rank

    def rank_of(self, request_id: int) -> int | None:
        """Where an open request is."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.rank

    def on_first_token(self, request_id: int) -> None:
        """The prompt is computed: figures that come from now on contain its blocks."""
        placed = self._placed.get(request_id)
        if placed is not None:
            self._ranks[placed.rank].promised -= placed.promised
            placed.promised = 0

    def on_figures(self, rank: int, free_blocks: int) -> None:
        self._ranks[rank].free_blocks = free_blocks

    def forget_prefixes(self) -> None:
        """The ranks' caches are empty."""
        for rank in self._ranks:
            rank.sent.clear()

    def end(self, request_id: int) -> None:
        """The request is over, however it ended. Harmless for one that is not open."""
        self.on_first_token(request_id)
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            self._ranks[placed.rank].open -= placed.sequences

    def load(self, rank: int) -> float:
        r = self._ranks[rank]
        return max((r.num_blocks - r.free_blocks + r.promised) / r.num_blocks, r.open / self._max_seqs)

    def _order(self, rank: int) -> tuple[float, int, int]:
        return self.load(rank), self._ranks[rank].open, (rank - self._turn) % len(self._ranks)

    # Affinity

    def _chain(self, request: AddRequest) -> list[bytes]:
        """Hashes of the prompt's full blocks; none if the rank will not look them up."""
        chain: list[bytes] = []
        if request.params.prompt_logprobs is None:  # such prompts are computed whole, and not cached
            tokens = request.prompt_token_ids
            root = self._hashes.root(request.cache_salt, lora_id=request.lora_id)
            self._hashes.extend_chain(chain, root, tokens, tokens.size)
        return chain

    def _with_prefix(self, chain: list[bytes], num_tokens: int) -> int | None:
        """The rank with the longest cached beginning, of those where it is long enough and that are not too full."""
        if self._affinity is None or not chain:
            return None
        reusable = chain[: (num_tokens - 1) // self._block_size]  # one token at least is always computed
        covered = [self._match(rank, reusable) * self._block_size / num_tokens for rank in self._ranks]
        if max(covered) < self._affinity.match_threshold:
            return None
        loads = [self.load(rank) for rank in range(len(self._ranks))]
        fullest = min(loads) + self._affinity.imbalance_threshold
        fit = [rank for rank, share in enumerate(covered)
               if 0 < share >= self._affinity.match_threshold and loads[rank] <= fullest]
        return min(fit, key=lambda rank: (-covered[rank], *self._order(rank)), default=None)

    @staticmethod
    def _match(rank: _Rank, chain: list[bytes]) -> int:
        for count, digest in enumerate(chain):
            if digest not in rank.sent:
                return count
        return len(chain)

    @staticmethod
    def _remember(rank: _Rank, chain: list[bytes]) -> None:
        for digest in reversed(chain):  # as ranks free blocks: the beginning stays longest
            rank.sent[digest] = None
            rank.sent.move_to_end(digest)
        while len(rank.sent) > rank.num_blocks:
            rank.sent.popitem(last=False)

    def check_integrity(self) -> None:
        """Assert that each rank's counts are the sums over open requests."""
        for index, rank in enumerate(self._ranks):
            placed = [p for p in self._placed.values() if p.rank == index]
            assert rank.promised == sum(p.promised for p in placed)
            assert rank.open == sum(p.sequences for p in placed)
            assert len(rank.sent) <= rank.num_blocks
