"""Which rank gets a request."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from xllm_npu.master.dp_router import Affinity, DpRouter
from xllm_npu.state.messages import AddRequest
from xllm_npu.state.sampling_params import SamplingParams

BLOCK = 4


class Requests:
    """Requests with ids that count up."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, prompt: list[int], salt: str = "", **params) -> AddRequest:
        self.count += 1
        return AddRequest(request_id=self.count, external_id="", prompt=np.array(prompt, np.int32).tobytes(),
                          params=SamplingParams(**params), arrival_time=0.0, cache_salt=salt)


def router(*blocks: int, affinity: Affinity | None = None, max_seqs: int = 100) -> DpRouter:
    return DpRouter(blocks, max_seqs=max_seqs, block_size=BLOCK, affinity=affinity, prefix_seed=7)


def test_a_burst_goes_round():
    r, make = router(100, 100, 100), Requests()
    assert [r.place(make([1] * 9)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_equal_ranks_take_turns_one_request_at_a_time():
    r, make, seen = router(100, 100), Requests(), []
    for _ in range(4):
        request = make([1])
        seen.append(r.place(request))
        r.end(request.request_id)
    assert seen == [0, 1, 0, 1]


def test_long_prompts_weigh_more():
    r, make = router(100, 100), Requests()
    assert r.place(make([1] * 80)) == 0
    assert [r.place(make([1] * 9)) for _ in range(7)] == [1] * 7  # 3 blocks each until 21 are promised on both
    assert r.place(make([1] * 9)) == 0


def test_what_a_rank_says_counts_and_a_promise_only_until_then():
    r, make = router(100, 100), Requests()
    r.on_figures(0, 50)
    long, short = make([1] * 160), make([1])
    assert r.place(long) == 1
    assert r.load(1) == 0.41
    r.on_first_token(long.request_id)
    r.on_figures(1, 100 - 41)
    assert r.load(1) == 0.41
    r.on_first_token(long.request_id)  # once is enough
    assert r.load(1) == 0.41
    r.on_figures(1, 40)
    assert r.place(short) == 0


def test_many_short_sequences_fill_a_rank_too():
    r, make = router(1000, 1000, max_seqs=8), Requests()
    r.on_figures(0, 900)
    assert [r.place(make([1], n=4)), r.place(make([1], n=4))] == [1, 0]
    assert r.load(1) == 0.5


def test_a_rank_with_more_blocks_has_more_room():
    r, make = router(100, 400), Requests()
    placed = [r.place(make([1] * 39)) for _ in range(30)]  # 10 blocks each
    assert 4 <= placed.count(0) <= 8


def test_unknown_requests_are_nobodys():
    r, make = router(10, 10), Requests()
    request = make([1])
    rank = r.place(request)
    assert r.rank_of(request.request_id) == rank
    for _ in range(2):
        r.end(request.request_id)
        assert r.rank_of(request.request_id) is None
    r.on_first_token(99)
    r.check_integrity()


# Affinity

TEXT = list(range(40))  # ten blocks
HALF = Affinity(match_threshold=0.5, imbalance_threshold=0.1)


def seeded(affinity: Affinity | None = HALF, blocks: int = 1000, **first) -> tuple[DpRouter, Requests]:
    """Rank 0 has computed TEXT, is done with it, and would lose a tie."""
    r, make = router(blocks, blocks, affinity=affinity), Requests()
    request = make(TEXT, **first)
    assert r.place(request) == 0
    r.end(request.request_id)
    return r, make


def test_a_known_beginning_wins():
    r, make = seeded()
    assert r.place(make([*TEXT, 1, 2])) == 0
    assert r.place(make([*TEXT[:24], *[99] * 20])) == 0  # 24 of 44
    assert r.place(make([99] * 44)) == 1


def test_only_with_affinity():
    r, make = seeded(affinity=None)
    assert r.place(make([*TEXT, 1, 2])) == 1


def test_too_little_of_it_does_not():
    r, make = seeded()
    assert r.place(make([*TEXT[:20], *[99] * 21])) == 1  # 20 of 41


def test_the_last_token_is_always_computed():
    r, make = seeded(Affinity(0.9, 1.0))
    assert r.place(make(TEXT[:8])) == 1  # 4 of 8: its second block would have to be computed for its last token
    r, make = seeded(Affinity(0.9, 1.0))
    assert r.place(make(TEXT)) == 0  # 36 of 40


def test_not_if_the_rank_is_fuller():
    r, make = seeded()
    r.on_figures(0, 890)
    assert r.place(make([*TEXT, 1, 2])) == 1
    r, make = seeded()
    r.on_figures(0, 910)
    assert r.place(make([*TEXT, 1, 2])) == 0


def test_salts_do_not_meet():
    r, make = seeded(salt="a")
    assert r.place(make([*TEXT, 1, 2], salt="b")) == 1
    r, make = seeded(salt="a")
    assert r.place(make([*TEXT, 1, 2], salt="a")) == 0


def test_prompts_that_are_not_cached_are_not_known():
    r, make = seeded(prompt_logprobs=1)
    assert r.place(make([*TEXT, 1, 2])) == 1
    r, make = seeded()
    assert r.place(make([*TEXT, 1, 2], prompt_logprobs=1)) == 1


def test_prefixes_that_ranks_forgot_decide_nothing():
    r, make = seeded()
    r.forget_prefixes()
    r._turn = 1
    assert r.place(make([*TEXT, 1, 2])) == 1
    r.check_integrity()


def test_the_longest_match_wins_and_equal_ones_go_to_the_emptier():
    r, make = router(1000, 1000, 1000, affinity=HALF), Requests()
    assert [r.place(make(TEXT[:count])) for count in (8, 28)] == [0, 1]
    assert r.place(make(TEXT[:30])) == 1
    r.on_figures(1, 500)
    assert r.place(make(TEXT[:30])) == 2, "rank 1 knows it and is too full"
    r.on_figures(1, 1000)
    r.on_figures(2, 900)
    assert r.place(make(TEXT[:30])) == 1
    r.on_figures(1, 850)
    assert r.place(make(TEXT[:30])) == 2


def test_what_is_remembered_is_bounded_and_the_oldest_goes():
    r, make = seeded(blocks=20)
    for start in (100, 200, 300, 400):  # ten blocks each, two on each rank
        request = make([start + i for i in range(40)])
        r.place(request)
        r.end(request.request_id)
        r.check_integrity()
    free = make([*TEXT, 1, 2])
    r._turn = 1
    assert r.place(free) == 1


def test_the_hashes_are_those_of_the_engines():
    from xllm_npu.state.kv_cache.block_pool import BlockPool
    from xllm_npu.state.kv_cache.prefix_cache import PrefixCache

    r, _ = seeded(salt="s")
    cache, chain = PrefixCache(BlockPool(8), BLOCK, 7), []
    cache.extend_chain(chain, cache.root("s"), np.array(TEXT, np.int32), len(TEXT))
    assert set(chain) == set(r._ranks[0].sent)


class Placing(RuleBasedStateMachine):
    """Whatever happens in whatever order, the books agree, and nobody is counted twice or for ever."""

    open_requests = Bundle("open_requests")

    def __init__(self) -> None:
        super().__init__()
        self.router, self.make = router(50, 50, 20, affinity=HALF), Requests()
        self.open: dict[int, int] = {}

    @rule(target=open_requests, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40), n=st.integers(1, 3))
    def place(self, prompt, n):
        request = self.make(prompt, n=n)
        self.open[request.request_id] = self.router.place(request)
        return request.request_id

    @rule(request_id=open_requests)
    def first_token(self, request_id):
        self.router.on_first_token(request_id)

    @rule(request_id=consumes(open_requests))
    def end(self, request_id):
        self.router.end(request_id)
        del self.open[request_id]

    @rule(rank=st.integers(0, 2), free=st.integers(0, 20))
    def figures(self, rank, free):
        self.router.on_figures(rank, free)

    @invariant()
    def books_agree(self):
        self.router.check_integrity()
        assert {key: self.router.rank_of(key) for key in self.open} == self.open
        if not self.open:
            assert all(r.promised == r.open == 0 for r in self.router._ranks)


TestPlacing = Placing.TestCase
TestPlacing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 200), min_size=12, max_size=60))
@settings(max_examples=50, deadline=None)
def test_nobody_is_much_fuller_than_the_others(lengths):
    """Greedy placement: the loads differ by the largest request at most."""
    r, make = router(10_000, 10_000, 10_000, max_seqs=10_000), Requests()
    for length in lengths:
        r.place(make([1] * length))
    loads = [r.load(rank) for rank in range(3)]
    assert max(loads) - min(loads) <= (max(lengths) // BLOCK + 1) / 10_000 + 1e-9
