"""How ranks are divided into groups, and the single-process state."""

from __future__ import annotations

import itertools

import pytest
import torch
from xllm_platform import collectives
from xllm_platform.base import PlatformError
from xllm_platform.parallel import Group, ParallelInit, ParallelState, partitions


def init(rank: int = 0, world: int = 1, tp: int = 1, dp: int = 1, ep: int = 1) -> ParallelInit:
    return ParallelInit(
        rank=rank, world_size=world, init_method="file:///unused", tp_size=tp, dp_size=dp, ep_size=ep
    )


def test_layout_of_four_ranks() -> None:
    parts = partitions(init(world=4, tp=2, dp=2, ep=2))
    assert parts == {
        "world": [(0, 1, 2, 3)],
        "tp": [(0, 1), (2, 3)],
        "dp": [(0, 2), (1, 3)],
        "ep": [(0, 2), (1, 3)],
        "moe_tp": [(0, 1), (2, 3)],
    }
    assert partitions(init(world=4, tp=2, dp=2, ep=4))["ep"] == [(0, 1, 2, 3)]


def test_every_kind_of_group_divides_the_world() -> None:
    for tp, dp in itertools.product((1, 2, 4), (1, 2, 3)):
        world = tp * dp
        for ep in (d for d in range(1, world + 1) if world % d == 0):
            sizes = {"world": world, "tp": tp, "dp": dp, "ep": ep, "moe_tp": world // ep}
            for kind, parts in partitions(init(world=world, tp=tp, dp=dp, ep=ep)).items():
                assert sorted(itertools.chain(*parts)) == list(range(world))
                assert {len(ranks) for ranks in parts} == {sizes[kind]}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (init(world=4, tp=2, dp=1), "2 \\* 1 is not 4"),
        (init(world=4, tp=4, ep=3), "ep_size must divide"),
        (init(world=2, tp=2, rank=2), "rank must be in 0..1"),
        (init(world=1, tp=0), "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(bad: ParallelInit, said: str) -> None:
    with pytest.raises(PlatformError, match=said):
        ParallelState.initialize(bad, "gloo")


def test_single_process_needs_no_process_group() -> None:
    for state in (ParallelState.single(), ParallelState.initialize(init(), "gloo")):
        for group in (state.world, state.tp, state.dp, state.ep, state.moe_tp):
            assert (group.size, group.rank, group.handle) == (1, 0, None)
        state.shutdown()
    assert not torch.distributed.is_initialized()


def test_collectives_over_one_rank_return_the_very_tensor() -> None:
    one, x = Group(), torch.tensor([1.5, -2.25])
    for result in (
        collectives.all_reduce(x, one),
        collectives.all_reduce(x, one, "avg"),
        collectives.all_gather(x, one, dim=0),
        collectives.reduce_scatter(x, one),
        collectives.all_to_all(x, one),
        collectives.broadcast(x, one),
    ):
        assert result is x
    assert x.tolist() == [1.5, -2.25]
    collectives.barrier(one)


def test_wrong_arguments_are_refused_for_one_rank_too() -> None:
    one = Group()
    with pytest.raises(ValueError, match="sum, avg, max, min"):
        collectives.all_reduce(torch.zeros(1), one, "mean")
    with pytest.raises(ValueError, match="floating point"):
        collectives.all_reduce(torch.zeros(1, dtype=torch.int64), one, "avg")
    with pytest.raises(ValueError, match=r"0\.\.0"):
        collectives.broadcast(torch.zeros(1), one, source=1)
