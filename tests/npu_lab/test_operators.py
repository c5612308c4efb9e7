"""References against plain formulas, on npu tensors through torch_npu's own entry points; wrong calls are refused.

Each operator has a right call and wrong ones that differ from it in one argument: another name, order, dtype, shape or
value. What the meta kernels let through and the device would not is in here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from npu_emulator.registry import references

pytestmark = pytest.mark.npu_lab
torch.manual_seed(0)
T, N, EXPERTS, TOP, BLOCK, HEADS, KV, DIM = 6, 32, 8, 2, 16, 4, 2, 16
X = torch.randn(T, N).half()
GAMMA = torch.rand(N).half()
ROTATED = torch.randn(1, T, HEADS, DIM).half()
ANGLES = torch.randn(1, T, 1, DIM // 2)
COS, SIN = (torch.cat((f(ANGLES), f(ANGLES)), -1).half() for f in (torch.cos, torch.sin))
KEY, VALUE = (torch.randn(T, KV, DIM).half() for _ in range(2))
CACHES = [torch.zeros(4, BLOCK, KV, DIM).half() for _ in range(2)]
SLOTS = torch.tensor([0, 0, 17, 16, 63, 40], dtype=torch.int32)
FLAT = [torch.randn(8, BLOCK, KV * DIM).half() for _ in range(2)]
QUERY = torch.randn(T, HEADS, DIM).half()
TABLE = torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)
MASK = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1)
ATTENTION = {"atten_mask": MASK, "actual_seq_qlen": [2, 6], "actual_seq_kvlen": [35, 20], "block_table": TABLE,
             "num_query_heads": HEADS, "num_key_value_heads": KV, "softmax_scale": 0.25, "input_layout": "TND",
             "sparse_mode": 3, "block_size": BLOCK}
CHOSEN = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(T)]).int()
ROUTING = {"active_num": T * TOP, "expert_num": EXPERTS, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True,
           "active_expert_range": [0, EXPERTS], "quant_mode": -1, "row_idx_type": 0}
SCORES = torch.rand(T, TOP).half()
MATRICES = torch.randn(EXPERTS, N, 8).half()
COUNTS = torch.tensor([1, 0, 2, 0, 3, 0, 0, 0])
INT8 = [torch.randint(-127, 127, s, dtype=torch.int8) for s in ((T, N), (N, 8))]
LOGITS = torch.randn(3, 50)
K, P = torch.tensor([1, 5, 50], dtype=torch.int32), torch.tensor([1.0, 0.5, 0.2])
Call = tuple[list[Any], dict[str, Any]]


def to(value: Any, device: str) -> Any:
    """Tensors of a call on a device; those that are written are copied even on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, list):
        return [to(one, device) for one in value]
    return {name: to(one, device) for name, one in value.items()} if isinstance(value, dict) else value


def on_npu(operator: str, arguments: list[Any], options: dict[str, Any]) -> list[torch.Tensor]:
    """What `torch_npu.operator` returns, or what it wrote to if it returns nothing; on the CPU."""
    args = to(arguments, "npu")
    found = getattr(torch_npu, operator)(*args, **to(options, "npu"))
    found = args[2:4] if found is None else found
    return [one.cpu() for one in (found if isinstance(found, tuple | list) else [found])]


RIGHT: dict[str, Call] = {
    "npu_rms_norm": ([X, GAMMA, 1e-5], {}),
    "npu_add_rms_norm": ([X, X + 1, GAMMA, 1e-5], {}),
    "npu_swiglu": ([X], {}),
    "npu_rotary_mul": ([ROTATED, COS, SIN], {}),
    "npu_scatter_pa_kv_cache": ([KEY, VALUE, *CACHES, SLOTS], {"cache_mode": "Norm"}),
    "npu_fused_infer_attention_score_v2": ([QUERY, *FLAT], ATTENTION),
    "npu_moe_gating_top_k_softmax": ([X], {"k": TOP}),
    "npu_moe_gating_top_k": ([X], {"k": 4, "bias": GAMMA, "k_group": 2, "group_count": 4, "group_select_mode": 1,
                                   "norm_type": 1, "routed_scaling_factor": 2.5}),
    "npu_moe_init_routing_v2": ([X, CHOSEN], ROUTING),
    "npu_moe_finalize_routing": ([torch.randn(T * TOP, N).half(), X, None, None, SCORES,
                                  torch.randperm(T * TOP).int(), None], {"drop_pad_mode": 2}),
    "npu_grouped_matmul": ([[X], [MATRICES]], {"group_list": COUNTS, "group_list_type": 1, "group_type": 0,
                                              "split_item": 2}),
    "npu_dynamic_quant": ([X], {}),
    "npu_quant_matmul": ([*INT8, torch.rand(8)], {"pertoken_scale": torch.rand(T), "output_dtype": torch.bfloat16}),
    "npu_format_cast": ([X, 29], {}),
    "npu_top_k_top_p": ([LOGITS, P, K], {}),
}


def rms(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.float(), (N,), GAMMA.float(), 1e-5).half()


def rotated() -> torch.Tensor:
    pairs = torch.view_as_complex(torch.stack(ROTATED.float().chunk(2, -1), -1))
    turned = torch.view_as_real(pairs * torch.complex(COS.float(), SIN.float())[..., : DIM // 2])
    return torch.cat((turned[..., 0], turned[..., 1]), -1).half()


def written() -> list[torch.Tensor]:
    caches = [cache.clone() for cache in CACHES]
    for cache, new in zip(caches, (KEY, VALUE)):
        for slot, row in zip(SLOTS.tolist(), new):
            cache[slot // BLOCK, slot % BLOCK] = row
    return caches


def attended() -> torch.Tensor:
    """With scaled_dot_product_attention, a sequence at a time."""
    out = []
    for begin, end, length, blocks in ((0, 2, 35, [1, 2, 3]), (2, 6, 20, [4, 5])):
        keys, values = (cache[blocks].view(-1, KV, DIM)[:length].float().transpose(0, 1) for cache in FLAT)
        seen = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        query = QUERY[begin:end].float().transpose(0, 1)
        out.append(F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=seen, scale=0.25,
                                                  enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out).half()


def test_norms_and_activation() -> None:
    torch.testing.assert_close(on_npu("npu_rms_norm", *RIGHT["npu_rms_norm"])[0], rms(X))
    normed, _, total = on_npu("npu_add_rms_norm", *RIGHT["npu_add_rms_norm"])
    torch.testing.assert_close(normed, rms(X + (X + 1)))
    assert torch.equal(total, X + (X + 1))
    gate, up = X.float().chunk(2, -1)
    torch.testing.assert_close(on_npu("npu_swiglu", [X], {})[0], (F.silu(gate) * up).half())


def test_rotary() -> None:
    torch.testing.assert_close(on_npu("npu_rotary_mul", *RIGHT["npu_rotary_mul"])[0], rotated())
    interleaved = [torch.stack(t.chunk(2, -1), -1).flatten(-2) for t in (ROTATED, COS, SIN)]
    found = on_npu("npu_rotary_mul", interleaved, {"rotary_mode": "interleave"})[0]
    torch.testing.assert_close(torch.cat((found[..., ::2], found[..., 1::2]), -1), rotated())


def test_cache_and_attention() -> None:
    for found, expected in zip(on_npu("npu_scatter_pa_kv_cache", *RIGHT["npu_scatter_pa_kv_cache"]), written()):
        assert torch.equal(found[1:], expected[1:])  # block 0 is the dummy
    name = "npu_fused_infer_attention_score_v2"
    torch.testing.assert_close(on_npu(name, *RIGHT[name])[0], attended(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [1, 7, 100])
def test_a_band_sees_the_window(window: int) -> None:
    options = {**ATTENTION, "sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    found = on_npu("npu_fused_infer_attention_score_v2", [QUERY, *FLAT], options)[0]
    keys, values = (cache[[1, 2, 3]].view(-1, KV, DIM)[:35].float() for cache in FLAT)
    near = slice(max(0, 34 - window), 34)  # what the first query, at position 33, sees
    scores = torch.einsum("hd,khd->hk", QUERY[0].float(), keys[near].repeat_interleave(HEADS // KV, 1)) * 0.25
    expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values[near].repeat_interleave(HEADS // KV, 1))
    torch.testing.assert_close(found[0].float(), expected, rtol=2e-3, atol=2e-3)


def test_experts_from_gating_to_the_sum() -> None:
    """The chain equals a loop over tokens and their experts."""
    weights, experts, _ = on_npu("npu_moe_gating_top_k_softmax", [X[:, :EXPERTS].contiguous()], {"k": TOP})
    rows, where, counts, _ = on_npu("npu_moe_init_routing_v2", [X, experts], ROUTING)
    out = on_npu("npu_grouped_matmul", [[rows], [MATRICES]], {"group_list": counts, "group_list_type": 1,
                                                             "group_type": 0, "split_item": 2})[0]
    found = on_npu("npu_moe_finalize_routing", [out, None, None, None, weights, where, None], {"drop_pad_mode": 2})[0]
    expected = torch.zeros(T, 8)
    best = X[:, :EXPERTS].float().softmax(-1).topk(TOP)
    for token in range(T):
        for weight, expert in zip(best.values[token], best.indices[token]):
            expected[token] += weight * (X[token].float() @ MATRICES[expert].float())
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=2e-2)


def test_gating_in_groups() -> None:
    found, experts, _ = on_npu("npu_moe_gating_top_k", *RIGHT["npu_moe_gating_top_k"])
    scores = X.float().sigmoid()
    for token in range(T):
        biased = (scores[token] + GAMMA.float()).view(4, -1)
        groups = sorted(range(4), key=lambda g: -biased[g].sort().values[-2:].sum().item())[:2]
        allowed = [i for i in range(N) if i // (N // 4) in groups]
        best = sorted(allowed, key=lambda i: -biased.flatten()[i].item())[:4]
        assert experts[token].tolist() == best
        weights = scores[token][best]
        torch.testing.assert_close(found[token].float(), weights / weights.sum() * 2.5, rtol=1e-3, atol=1e-3)


def test_only_active_experts_get_rows() -> None:
    rows, where, counts, _ = on_npu("npu_moe_init_routing_v2", [X, CHOSEN], {**ROUTING, "active_expert_range": [2, 5]})
    active = [(e, t, j) for t in range(T) for j, e in enumerate(CHOSEN[t].tolist()) if 2 <= e < 5]
    assert counts.tolist() == [sum(e == expert for e, _, _ in active) for expert in (2, 3, 4)]
    for place, (_, token, column) in enumerate(sorted(active)):
        assert where[token * TOP + column] == place
        assert torch.equal(rows[place], X[token])
    assert (where == -1).sum() == T * TOP - len(active)


def test_quantised_products() -> None:
    quantised, scale = on_npu("npu_dynamic_quant", [X], {})
    assert scale.dtype == torch.float32
    assert quantised.abs().amax(-1).eq(127).all()
    torch.testing.assert_close(quantised.float() * scale[:, None], X.float(), rtol=0, atol=float(scale.max()) * 0.51)
    (x1, x2, column), options = RIGHT["npu_quant_matmul"]
    expected = (x1.double() @ x2.double()) * column.double() * options["pertoken_scale"].double()[:, None]
    torch.testing.assert_close(on_npu("npu_quant_matmul", [x1, x2, column], options)[0], expected.bfloat16())
    assert torch.equal(on_npu("npu_format_cast", [X, 29], {})[0], X)


def test_filters_of_logits() -> None:
    found = on_npu("npu_top_k_top_p", [LOGITS, P, K], {})[0]
    for row, k, p, logits in zip(found, K.tolist(), P.tolist(), LOGITS):
        ids = logits.argsort(descending=True)[:k]
        mass = logits[ids].softmax(-1).cumsum(-1)
        kept = [i for i, before in zip(ids.tolist(), [0.0, *mass.tolist()]) if before < p]
        assert sorted(row.isfinite().nonzero().flatten().tolist()) == sorted(kept)
        assert torch.equal(row[kept], logits[kept])


def changed(name: str, place: int | str, value: Any) -> Call:
    arguments, options = RIGHT[name]
    if isinstance(place, str):
        return arguments, {**options, place: value}
    return [value if i == place else one for i, one in enumerate(arguments)], options


FIA = "npu_fused_infer_attention_score_v2"
WRONG: list[tuple[str, int | str, Any]] = [
    ("npu_rms_norm", 1, GAMMA.float()), ("npu_rms_norm", 1, GAMMA[:-1]), ("npu_rms_norm", 2, 0.0),
    ("npu_rms_norm", "eps", 1e-5), ("npu_rms_norm", 0, GAMMA.int()),
    ("npu_add_rms_norm", 1, X.float()), ("npu_add_rms_norm", 1, X[:3]), ("npu_add_rms_norm", 2, GAMMA.bfloat16()),
    ("npu_swiglu", 0, X[:, :-1]), ("npu_swiglu", "axis", -1), ("npu_swiglu", 0, X.int()),
    ("npu_rotary_mul", 0, ROTATED[0]), ("npu_rotary_mul", 1, COS.float()), ("npu_rotary_mul", 1, COS[..., :8]),
    ("npu_rotary_mul", 2, torch.rand(1, T, 1, DIM).half()), ("npu_rotary_mul", "rotary_mode", "full"),
    ("npu_rotary_mul", "rotary_mode", "interleave"),
    ("npu_scatter_pa_kv_cache", 0, KEY.float()), ("npu_scatter_pa_kv_cache", 4, SLOTS[:-1]),
    ("npu_scatter_pa_kv_cache", 4, SLOTS + 1), ("npu_scatter_pa_kv_cache", 4, SLOTS - 1),
    ("npu_scatter_pa_kv_cache", 4, SLOTS.float()), ("npu_scatter_pa_kv_cache", 4, SLOTS.clamp(max=17)),
    ("npu_scatter_pa_kv_cache", "cache_mode", "PA_NZ"), ("npu_scatter_pa_kv_cache", 2, CACHES[0].flatten(2)),
    (FIA, 0, QUERY.float()), (FIA, 0, QUERY.bfloat16()), (FIA, 0, QUERY.flatten(1)), (FIA, 1, FLAT[0][:, :8]),
    (FIA, "actual_seq_qlen", [2, 4]), (FIA, "actual_seq_qlen", None), (FIA, "actual_seq_kvlen", [35, 99]),
    (FIA, "actual_seq_kvlen", None), (FIA, "actual_seq_lengths_kv", [35, 20]), (FIA, "block_table", TABLE.long()),
    (FIA, "block_table", TABLE + 5), (FIA, "block_table", None), (FIA, "block_size", 128), (FIA, "sparse_mode", 2),
    (FIA, "atten_mask", None), (FIA, "atten_mask", MASK.t().contiguous()), (FIA, "atten_mask", MASK[:1024, :1024]),
    (FIA, "atten_mask", MASK.half()), (FIA, "num_key_value_heads", 4), (FIA, "num_query_heads", 8),
    (FIA, "input_layout", "NTD"), (FIA, "scale", 0.25),
    ("npu_moe_gating_top_k_softmax", "k", N + 1), ("npu_moe_gating_top_k_softmax", 0, X.int()),
    ("npu_moe_gating_top_k", "bias", GAMMA.float()), ("npu_moe_gating_top_k", "bias", GAMMA[1:]),
    ("npu_moe_gating_top_k", "k_group", 5), ("npu_moe_gating_top_k", "group_count", 5),
    ("npu_moe_gating_top_k", "norm_type", 2), ("npu_moe_gating_top_k", "k", 17),
    ("npu_moe_init_routing_v2", 1, CHOSEN.long()), ("npu_moe_init_routing_v2", 1, CHOSEN[1:]),
    ("npu_moe_init_routing_v2", 1, CHOSEN + 1 + CHOSEN.max()), ("npu_moe_init_routing_v2", "active_num", T),
    ("npu_moe_init_routing_v2", "active_expert_range", [0, EXPERTS + 1]),
    ("npu_moe_finalize_routing", 4, SCORES.float()), ("npu_moe_finalize_routing", 4, SCORES.t().contiguous()[:, :5]),
    ("npu_moe_finalize_routing", 5, torch.arange(T * TOP)), ("npu_moe_finalize_routing", 1, X[1:]),
    ("npu_moe_finalize_routing", 5, torch.arange(T * TOP).int() - 1),
    ("npu_grouped_matmul", "group_list", COUNTS.int()), ("npu_grouped_matmul", "group_list", COUNTS[1:]),
    ("npu_grouped_matmul", "group_list_type", 0), ("npu_grouped_matmul", "group_list", COUNTS + 1),
    ("npu_grouped_matmul", 1, [MATRICES.transpose(1, 2).contiguous()]), ("npu_grouped_matmul", 1, [MATRICES.float()]),
    ("npu_dynamic_quant", 0, X.float()), ("npu_dynamic_quant", "smooth_scales", GAMMA.float()),
    ("npu_quant_matmul", 0, X), ("npu_quant_matmul", 1, INT8[1].t().contiguous()),
    ("npu_quant_matmul", 2, torch.rand(7)),
    ("npu_quant_matmul", "pertoken_scale", torch.rand(T).half()), ("npu_quant_matmul", "output_dtype", None),
    ("npu_format_cast", 1, 30),
    ("npu_top_k_top_p", 1, K), ("npu_top_k_top_p", 1, P.half()), ("npu_top_k_top_p", 2, K.long()),
    ("npu_top_k_top_p", 2, K * 0), ("npu_top_k_top_p", 2, K + 1000), ("npu_top_k_top_p", 1, P + 1),
]


@pytest.mark.parametrize(("name", "place", "value"), WRONG,
                         ids=[f"{name.removeprefix('npu_')}-{place}-{i}" for i, (name, place, _) in enumerate(WRONG)])
def test_a_wrong_call_is_refused(name: str, place: int | str, value: Any) -> None:
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        on_npu(name, *changed(name, place, value))


@pytest.mark.parametrize("name", RIGHT)
def test_every_right_call_is_taken_and_has_wrong_neighbours(name: str) -> None:
    assert sum(wrong == name for wrong, _, _ in WRONG) >= (1 if name == "npu_format_cast" else 2)
    on_npu(name, *RIGHT[name])


def test_a_reference_with_other_names_cannot_be_registered() -> None:
    from npu_emulator.registry import npu_operator

    before = references["npu::npu_swiglu"]
    wrong: list[Callable[..., Any]] = [lambda x, dim: x, lambda dim, input: input]
    for reference in wrong:
        with pytest.raises(TypeError, match="the schema has"):
            npu_operator("npu_swiglu")(reference)
    assert references["npu::npu_swiglu"] is before
