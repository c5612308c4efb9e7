"""Routing against transformers' routers, and every way of computing experts against the plain one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from xllm_models.moe_config import MoeConfig
from xllm_models.ops import cpu_moe, torch_moe

HIDDEN, EXPERTS, TOP = 32, 16, 4
BASE = MoeConfig(num_experts=EXPERTS, top_k=TOP, intermediate_size=24, layers=(True,))
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP}
GROUPS = {"n_group": 4, "topk_group": 2}


def ours(**changes) -> MoeConfig:
    return dataclasses.replace(BASE, **changes)


ROUTERS = {
    "qwen3": (Qwen3MoeTopKRouter, Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=True), ours()),
    "qwen3 as they are": (Qwen3MoeTopKRouter, Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=False),
                          ours(normalize=False)),
    "mixtral": (MixtralTopKRouter, MixtralConfig(**SIZES, num_local_experts=EXPERTS), ours()),
    "deepseek 2": (DeepseekV2TopkRouter, DeepseekV2Config(
        **SIZES, **GROUPS, n_routed_experts=EXPERTS, topk_method="group_limited_greedy", routed_scaling_factor=3.0),
        ours(normalize=False, scaling_factor=3.0, num_groups=4, top_groups=2)),
    "deepseek 3": (DeepseekV3TopkRouter, DeepseekV3Config(
        **SIZES, **GROUPS, n_routed_experts=EXPERTS, norm_topk_prob=True, routed_scaling_factor=2.5),
        ours(scoring="sigmoid", scaling_factor=2.5, num_groups=4, top_groups=2, group_score="top2_sum",
             correction_bias=True)),
    "gpt-oss": (GptOssTopKRouter, GptOssConfig(**SIZES, num_local_experts=EXPERTS),
                ours(scoring="softmax_top_k", bias=True)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_are_transformers(name):
    router_class, config, moe = ROUTERS[name]
    torch.manual_seed(0)
    router = router_class(config)
    with torch.no_grad():
        for tensor in [*router.parameters(), *router.buffers()]:
            tensor.normal_(std=0.4)
        logits, weights, ids = router(torch.randn(50, HIDDEN))
    found, chosen = torch_moe.route(logits, moe, getattr(router, "e_score_correction_bias", None))
    assert chosen.dtype == torch.int32
    dense = torch.zeros(2, 50, EXPERTS)  # the order among the chosen is free
    dense[0].scatter_(1, ids, weights)
    dense[1].scatter_(1, chosen.long(), found)
    torch.testing.assert_close(dense[1], dense[0])


def case(tokens: int, *, hidden: int = 40, width: int = 24, experts: int = 8, top: int = 3, dtype=torch.float32,
         bias: bool = False):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    ids = torch.stack([torch.randperm(experts, generator=generator)[:top] for _ in range(tokens)]).to(torch.int32)
    matrices = normal(experts, 2 * width, hidden) / 6, normal(experts, hidden, width) / 5
    biases = (normal(experts, 2 * width), normal(experts, hidden)) if bias else (None, None)
    numbers = [None if t is None else t.to(dtype) for t in (normal(tokens, hidden), *matrices, *biases)]
    return numbers, ids, normal(tokens, top).softmax(1)


def token_by_token(numbers, ids, weights, activation, first, count):
    """Float64, one token and one expert at a time."""
    x, gate_up, down, up_bias, down_bias = (None if t is None else t.double() for t in numbers)
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if first <= expert < first + count:
                inner = gate_up[expert] @ x[token] + (0 if up_bias is None else up_bias[expert])
                outer = down[expert] @ torch_moe.gated(inner, activation)
                out[token] += weight * (outer + (0 if down_bias is None else down_bias[expert]))
    return out


WAYS = {"plain": torch_moe.moe_experts, "all experts": torch_moe.moe_experts_of_all, "cpu": cpu_moe.moe_experts}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize(("tokens", "first", "count", "bias"), [(1, 0, 8, False), (5, 2, 4, True), (29, 0, 8, True),
                                                                (90, 5, 3, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(way, activation, tokens, first, count, bias, dtype):
    numbers, ids, weights = case(tokens, dtype=dtype, bias=bias)
    ids[0, 0] = -1  # padding visits nobody
    expected = token_by_token(numbers, ids, weights, activation, first, count)
    here = [None if t is None else t[first : first + count].contiguous() for t in numbers[1:]]
    found = WAYS[way](numbers[0], ids, weights, here[0], here[1], activation, first, here[2], here[3])
    assert found.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [0, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernel_and_products_agree_on_any_number_of_threads(monkeypatch, rows, threads):
    monkeypatch.setattr(cpu_moe, "KERNEL_ROWS", rows)
    monkeypatch.setattr(cpu_moe, "_ONE_THREAD", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 6, 33):
            numbers, ids, weights = case(tokens, hidden=130, width=37)
            found = cpu_moe.moe_experts(numbers[0], ids, weights, numbers[1], numbers[2], "silu")
            expected = torch_moe.moe_experts(numbers[0], ids, weights, numbers[1], numbers[2], "silu")
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
def test_an_expert_that_overflows_for_others_tokens_harms_nobody(way):
    numbers, ids, weights = case(6)
    numbers[1][7] = torch.inf
    ids[ids == 7] = -1
    found = WAYS[way](numbers[0], ids, weights, numbers[1], numbers[2], "silu")
    assert found.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_no_expert_here(way):
    numbers, ids, weights = case(4)
    found = WAYS[way](numbers[0], ids, weights, numbers[1], numbers[2], "silu", 100)
    assert found.shape == (4, 40)
    assert not found.any()


def test_clamped_swiglu_is_gpt_oss():
    config = GptOssConfig(hidden_size=8, intermediate_size=6, num_local_experts=2)
    x = 10 * torch.randn(20, 12, generator=torch.Generator().manual_seed(0))  # beyond the limit, too
    with torch.device("meta"):
        experts = GptOssExperts(config)
    alternating = torch.stack(x.chunk(2, dim=1), dim=2).flatten(1)
    torch.testing.assert_close(torch_moe.gated(x, "clamped_swiglu"), experts._apply_gate(alternating))
