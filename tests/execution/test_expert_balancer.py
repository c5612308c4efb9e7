"""Experts that move between real ranks while a model runs: the same logits before, during and after, and even loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from xllm_models.layers.expert_moves import plan_moves
from xllm_models.weights.loader import load_weights
from xllm_models.weights.source import open_source
from xllm_platform.parallel import ExpertExchange

from tests.support.paged_model import PagedModel
from tests.support.ranks import World, run_ranks
from xllm_npu.execution.expert_balance import home_placement, place, rank_loads
from xllm_npu.execution.expert_balancer import ExpertBalancer

LAYOUTS = {2: [(2, 1, 2, False), (1, 2, 2, False), (1, 2, 2, True)], 4: [(2, 2, 2, False)]}  # tp, dp, ep, all to all
STEPS, INTERVAL = 60, 16


def skew(paged: PagedModel) -> None:
    """Experts 0, 1 and 2, all of the first rank, are chosen by nearly every token."""
    for layer in paged.model.layers:
        logits = layer.mlp.router.ops.route

        def route(scores, moe, bias, logits=logits):
            more = torch.tensor([3.0, 2.5, 2.0, 0, 0, 0, 0, 0])
            return logits(scores + more * scores.std(dim=1, keepdim=True), moe, bias)

        layer.mlp.router.ops = type("Skewed", (), {"route": staticmethod(route)})


def tokens_of(step: int, dp_rank: int) -> list[int]:
    rows = (7, 4)[dp_rank]
    return np.random.default_rng((step, dp_rank)).integers(0, 260, rows).tolist()


def logits_of(paged: PagedModel, step: int, dp_rank: int, counts: tuple[int, ...]) -> torch.Tensor:
    paged.blocks.tables.clear()
    paged.blocks.lengths.clear()
    paged.blocks.tables[0], paged.blocks.lengths[0] = [1], 0
    return paged.logits([(0, tokens_of(step, dp_rank))], counts)[0]


def on_each_rank(world: World, directory: str, layouts: list[list[int]]) -> list[dict]:
    found = []
    for tp, dp, ep, all_to_all in layouts:
        exchange = ExpertExchange(all_to_all=bool(all_to_all), balanced=True, redundant=1)
        with world.join(tp_size=tp, dp_size=dp, ep_size=ep, experts=exchange) as parallel, torch.inference_mode():
            paged = PagedModel(directory, parallel=parallel)
            skew(paged)
            balancer = ExpertBalancer(paged.model, parallel, INTERVAL, 0.95)
            logits, moving, counts = [], 0, (7, 4) if dp == 2 else ()
            for step in range(STEPS):
                logits.append(logits_of(paged, step, parallel.dp.rank, counts))
                balancer.after_step()
                moving += balancer.moving
            placements = torch.tensor(np.array(balancer.placements))
            paged.model.allocate_weights()
            load_weights(paged.model, open_source(directory))  # each expert into its first place
            balancer.bring_home()
            found.append({
                "dp_rank": parallel.dp.rank, "logits": torch.cat(logits), "moving": moving,
                "updates": balancer.updates, "placements": placements,
                "home": torch.tensor(np.array(balancer.placements)),
                "loaded again": torch.cat([logits_of(paged, step, parallel.dp.rank, counts) for step in range(4)]),
            })
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [pytest.param(n, marks=[pytest.mark.slow] if n > 2 else []) for n in LAYOUTS])
@pytest.mark.slow
def test_experts_move_and_logits_stay(tmp_path, size):
    from tests.support.tiny_model import make_tiny_model

    directory = make_tiny_model(tmp_path, "qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
                                norm_topk_prob=True)
    answers = run_ranks(on_each_rank, size, str(directory), LAYOUTS[size])
    alone = PagedModel(directory)
    skew(alone)
    with torch.inference_mode():
        expected = {dp: torch.cat([logits_of(alone, step, dp, ()) for step in range(STEPS)]) for dp in (0, 1)}
    for at, layout in enumerate(LAYOUTS[size]):
        for rank in answers:
            answer = rank[at]
            torch.testing.assert_close(answer["logits"], expected[answer["dp_rank"]], rtol=0, atol=1e-3)
            again = answer["loaded again"]
            torch.testing.assert_close(again, expected[answer["dp_rank"]][: len(again)], rtol=0, atol=1e-3)
            assert all(np.array_equal(one, home_placement(8, 2, 5)) for one in answer["home"].numpy())
            assert answer["updates"] >= 2, f"{layout}: every layer's load is skewed, all should have changed"
            assert answer["moving"] > 1, "a layer's experts move over several steps"
            assert answer["placements"].equal(answers[0][at]["placements"]), "ranks disagree on who is where"
        for placement in answers[0][at]["placements"].numpy():
            home = home_placement(8, 2, 5)
            assert not np.array_equal(placement, home)
            busy = np.array([9, 8, 7, 1, 1, 1, 1, 1.0])
            assert rank_loads(busy, placement).max() < rank_loads(busy, home).max() * 0.8


def test_moves_spread_over_ranks():
    now = home_placement(16, 4, 5)
    new = place(100 / np.arange(1, 17), now)
    moves = plan_moves(now.tolist(), new.tolist())
    held = {(r, s): e for r, row in enumerate(now.tolist()) for s, e in enumerate(row)}
    for move in moves:
        assert held[move.source] == move.expert
        assert new[move.target] == move.expert
        assert now[move.target] != move.expert
    unmoved = (new == now) | (new < 0)
    assert len(moves) == (~unmoved).sum()
    targets = [move.target[0] for move in moves[:2]]
    assert len(set(targets)) == len(targets)
