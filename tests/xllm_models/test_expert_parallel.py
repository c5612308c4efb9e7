"""Mixture-of-experts models on two and four ranks, real processes over gloo, against one process and transformers.

Data-parallel ranks have different numbers of rows, and at times no more than a dummy row.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from xllm_models.config import ModelConfig
from xllm_models.layers.sharding import ShardingError, check_expert_sharding
from xllm_platform.parallel import ExpertExchange

from tests.support.paged_model import PagedModel
from tests.support.ranks import World, run_ranks

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MODELS = {
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {"n_shared_experts": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
}
TWO = [(2, 1, 1, 1), (2, 1, 2, 1), (2, 1, 2, 2), (1, 2, 1, 1), (1, 2, 2, 1), (1, 2, 2, 2)]  # tp, dp, ep, degree
FOUR = [(2, 2, 2, 1), (2, 2, 4, 2)]
PROMPTS = [[3, 7, 11, 200, 5, 9, 41, 77, 130], [100, 2, 33], [8]]
# What each data-parallel rank computes in each step: (prompt, new tokens); nothing is a dummy row.
STEPS = [
    [[(0, 5)], [(1, 2), (2, 1)]],
    [[(0, 1)], []],
    [[(0, 3)], [(1, 1)]],
]


def steps_of(dp_rank: int, dp_size: int) -> list[list[tuple[int, int]]]:
    """Ranks beyond the second do as the first two; a single rank computes everything."""
    if dp_size == 1:
        return [[(p, n) for rank in step for p, n in rank] for step in STEPS]
    return [step[dp_rank] for step in STEPS]


def in_order(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(rows, key=lambda row: row[1] > 1)


def drive(paged: PagedModel, dp_rank: int = 0, dp_size: int = 1) -> dict[int, torch.Tensor]:
    """{prompt: logits [tokens, vocab]}"""
    done: dict[int, int] = {}
    found: dict[int, list[torch.Tensor]] = {}
    for index, rows in enumerate(steps_of(dp_rank, dp_size)):
        counts = tuple(max(1, sum(n for _, n in steps_of(r, dp_size)[index])) for r in range(dp_size))
        work = []
        for prompt, n in in_order(rows):
            begin = done.get(prompt, 0)
            done[prompt] = begin + n
            work.append((prompt, PROMPTS[prompt][begin : begin + n]))
        logits = paged.logits(work or [paged.dummy_row()], counts if dp_size > 1 else ())
        for (prompt, _), rows_logits in zip(work, logits):
            found.setdefault(prompt, []).append(rows_logits)
    return {prompt: torch.cat(parts) for prompt, parts in found.items()}


def on_each_rank(world: World, directories: list[str], layouts: list[list[int]]) -> list[dict[int, torch.Tensor]]:
    found = []
    for directory in directories:
        for tp, dp, ep, degree in layouts:
            exchange = ExpertExchange(all_to_all=degree == 2)
            with world.join(tp_size=tp, dp_size=dp, ep_size=ep, experts=exchange) as parallel:
                found.append(drive(PagedModel(directory, parallel=parallel), parallel.dp.rank, dp))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    from tests.support.tiny_model import make_tiny_model  # not above: the ranks need no transformers

    return {name: make_tiny_model(tmp_path_factory.mktemp(name), architecture, **config)
            for name, (architecture, config) in MODELS.items()}


@pytest.mark.multiprocess
@pytest.mark.parametrize("layouts", [TWO, pytest.param(FOUR, marks=pytest.mark.slow)], ids=["two ranks", "four ranks"])
@pytest.mark.slow
def test_ranks_equal_one_process(models, layouts):
    from transformers import AutoModelForCausalLM

    size = layouts[0][0] * layouts[0][1]
    answers = run_ranks(on_each_rank, size, [str(d) for d in models.values()], layouts)
    at = 0
    for name, directory in models.items():
        alone = drive(PagedModel(directory))
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        for prompt, logits in alone.items():
            with torch.no_grad():
                expected = reference(torch.tensor([PROMPTS[prompt]])).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
        for layout in layouts:
            for rank in range(size):
                tp, dp = layout[:2]
                wanted = {p for step in steps_of(rank // tp, dp) for p, _ in step}
                assert set(answers[rank][at]) == wanted
                for prompt, logits in answers[rank][at].items():
                    torch.testing.assert_close(logits, alone[prompt], rtol=0, atol=1e-3,
                                               msg=lambda m, at=(name, layout, rank, prompt): f"{at}: {m}")
            at += 1


def fails_on_rank_1(world: World) -> None:
    with world.join(tp_size=2) as parallel:
        if parallel.world.rank == 1:
            raise ValueError("a mistake of rank 1")
        torch.distributed.barrier()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_failing_rank_is_the_tests_error():
    with pytest.raises(AssertionError, match=r"rank 1 failed(.|\n)*a mistake of rank 1"):
        run_ranks(fails_on_rank_1, 2)


CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 48,
          "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
          "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}


@pytest.mark.parametrize(("world", "ep", "all_to_all", "message"), [
    (4, 4, False, r"ep_size=4 on 4 devices cannot cut Qwen3MoeForCausalLM with 6 experts .* 36; sizes that work: 1, 2"),
    (8, 1, False, r"ep_size=1 on 8 devices .*; sizes that work: 2\."),
    (4, 2, True, r"ep_size=2 on 4 devices with expert_parallel_degree=2, .*; no size works"),
    (6, 3, True, r"ep_size=3 .*; sizes that work: 6\."),
])
def test_impossible_sizes_name_those_that_work(world, ep, all_to_all, message):
    with pytest.raises(ShardingError, match=message):
        check_expert_sharding(ModelConfig.from_dict(CONFIG), world, ep, ExpertExchange(all_to_all))


@pytest.mark.parametrize(("world", "ep", "all_to_all"), [(4, 1, False), (4, 2, False), (6, 6, True), (3, 3, False)])
def test_possible_sizes(world, ep, all_to_all):
    check_expert_sharding(ModelConfig.from_dict(CONFIG), world, ep, ExpertExchange(all_to_all))


def test_a_model_without_experts_has_none_to_spread():
    dense = dataclasses.replace(ModelConfig.from_dict(CONFIG), moe=None)
    with pytest.raises(ShardingError, match="has no experts: set ep_size to 1"):
        check_expert_sharding(dense, 2, 2, ExpertExchange())
    check_expert_sharding(dense, 2, 1, ExpertExchange())
