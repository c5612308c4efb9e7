"""Placement of experts by load: rules that always hold, and how even it becomes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.execution.expert_balance import EMPTY, cosine, home_placement, moves, place, rank_loads


def check(placement, experts):
    for row in placement:
        real = row[row != EMPTY].tolist()
        assert len(real) == len(set(real)), "two copies on one rank"
    assert set(range(experts)) <= set(placement.ravel().tolist()), "an expert is nowhere"


@settings(max_examples=150, deadline=None)
@given(ranks=st.integers(1, 6), each=st.integers(1, 6), spare=st.integers(0, 4), data=st.data())
def test_any_load_gives_a_valid_placement_that_is_no_worse(ranks, each, spare, data):
    experts = ranks * each
    spare = min(spare, experts - each)
    now = home_placement(experts, ranks, each + spare)
    for _ in range(3):
        load = data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
        found = place(load, now)
        assert found.shape == now.shape
        check(found, experts)
        assert rank_loads(load, found).sum() == pytest.approx(sum(load))
        assert rank_loads(load, found).max() <= rank_loads(load, now).max()
        for new, old in zip(found, now):
            for place_, expert in enumerate(old):
                assert expert == EMPTY or expert not in new or new[place_] == expert, "stays on the rank, moved anyway"
        now = found


@pytest.mark.parametrize(("experts", "ranks", "spare"), [(64, 4, 1), (64, 8, 2), (256, 8, 1), (16, 2, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_skewed_loads_become_even_within_a_tenth(experts, ranks, spare, seed):
    rng = np.random.default_rng(seed)
    load = 10000 / np.arange(1, experts + 1) ** 0.8
    now = home_placement(experts, ranks, experts // ranks + spare)
    before = rank_loads(load, now)
    assert before.max() > 1.3 * before.mean()
    rng.shuffle(load)
    after = rank_loads(load, place(load, now))
    assert after.max() <= 1.1 * after.mean()


def test_little_moves_when_the_load_changes_little():
    rng = np.random.default_rng(0)
    load = rng.permutation(10000 / np.arange(1, 129) ** 0.7)
    first = place(load, home_placement(128, 8, 17))
    assert place(load, first) is first
    again = place(load * rng.uniform(0.9, 1.1, 128), first)
    assert moves(again, first) < 128 // 2


def test_an_expert_too_busy_for_one_rank_is_copied():
    load = np.ones(8)
    load[3] = 50
    found = place(load, home_placement(8, 4, 3))
    assert (found == 3).sum() == 4
    assert rank_loads(load, found).max() <= 1.1 * rank_loads(load, found).mean()


def test_no_load_moves_nothing():
    now = home_placement(8, 2, 5)
    assert place(np.zeros(8), now) is now
    assert place(np.ones(8), now) is now


def test_cosine():
    assert cosine([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert cosine([1, 0], [0, 1]) == 0
    assert cosine([0, 0], [0, 0]) == 1
