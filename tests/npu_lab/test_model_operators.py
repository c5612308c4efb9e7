"""The NPU operators and the NPU attention of xllm_models against torch's, and against themselves with one call changed.

`MUTATIONS` are edits of their source: another name, order, dtype or value in a call of torch_npu. With each of them the
check of that file fails, so the check would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from npu_emulator import dispatch
from xllm_models.attention import npu_attention, torch_attention
from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.forward_input import AttentionMetadata
from xllm_models.moe_config import MoeConfig
from xllm_models.ops import npu_moe, npu_ops, npu_quant, torch_moe, torch_ops, torch_quant

from tests.npu_lab.mutation import mutated

pytestmark = pytest.mark.npu_lab
HEADS, KV, DIM, BLOCK = 4, 2, 16, 16
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
# Rows of one step: (keys before, new tokens); prefill, a prefix that is there, decode, several tokens at once.
ROWS = ((0, 20), (16, 5), (37, 1), (30, 4))


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, **CLOSE)


def check_operators(ops: ModuleType) -> None:
    torch.manual_seed(1)
    x, residual = (torch.randn(2, 7, 32) * 0.03).half()  # so small that eps matters
    weight = torch.rand(32).half()
    same(ops.rms_norm(x.npu(), weight.npu(), 1e-3), torch_ops.rms_norm(x, weight, 1e-3))
    found = ops.add_rms_norm(x.npu(), residual.npu(), weight.npu(), 1e-3)
    for one, expected in zip(found, torch_ops.add_rms_norm(x, residual, weight, 1e-3)):
        same(one, expected)
    check_norms_of_two_types(ops, x, residual)
    for activation in ("silu", "gelu"):
        same(ops.act_and_mul(x.npu(), activation), torch_ops.act_and_mul(x, activation))
    check_rotary(ops)
    check_filters(ops)


def check_norms_of_two_types(ops: ModuleType, x: torch.Tensor, residual: torch.Tensor) -> None:
    """By kernels of this project, as the partial rotation is."""
    weight = torch.rand(32)
    ours = [f"triton::{name}_kernel" for name in ("rms_norm", "add_rms_norm")]
    before = [dispatch.calls[name] for name in ours]
    same(ops.rms_norm(x.npu(), weight.npu(), 1e-3), torch_ops.rms_norm(x, weight, 1e-3))
    found = ops.add_rms_norm(x.npu(), residual.npu(), weight.npu(), 1e-3)
    for one, expected in zip(found, torch_ops.add_rms_norm(x, residual, weight, 1e-3)):
        same(one, expected)
    assert [dispatch.calls[name] for name in ours] == [count + 1 for count in before]


def check_filters(ops: ModuleType) -> None:
    for dtype in (torch.float32, torch.float16):
        logits = torch.randn(5, 60).to(dtype)
        top_k = torch.tensor([1, 7, 60, 20, 3], dtype=torch.int32)
        top_p = torch.tensor([1.0, 0.7, 0.4, 1.0, 0.5])
        found = ops.top_k_top_p(logits.npu(), top_k.npu(), top_p.npu()).cpu()
        assert torch.equal(found, torch_ops.top_k_top_p(logits, top_k, top_p))


def moe(**changes: Any) -> MoeConfig:
    return MoeConfig(**{"num_experts": 8, "top_k": 3, "intermediate_size": 16, "layers": (True,), **changes})


ROUTERS = [moe(), moe(normalize=False, scaling_factor=2.0), moe(scoring="softmax_top_k"),
           moe(num_groups=4, top_groups=2), moe(scoring="sigmoid", normalize=False),
           moe(scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2_sum", scaling_factor=2.5),
           moe(scoring="sigmoid", num_groups=2, top_groups=1), moe(scoring="sigmoid")]


def check_experts(ops: ModuleType) -> None:
    torch.manual_seed(4)
    logits, bias = torch.randn(9, 8), torch.rand(8)
    for config in ROUTERS:
        for given in (None, bias):
            weights, ids = ops.route(logits.npu(), config, None if given is None else given.npu())
            wanted, wanted_ids = torch_moe.route(logits, config, given)
            assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
            same(by_expert(weights.cpu(), ids.cpu()), by_expert(wanted, wanted_ids))
    weights, ids = torch_moe.route(logits, ROUTERS[0])
    x, gate_up, down = (torch.randn(shape).half() for shape in ((9, 24), (8, 32, 24), (8, 24, 16)))
    ids[2, 1], ids[4] = -1, -1  # nobody's
    ids[ids == 7] = -1  # an expert without tokens
    for first, last in ((0, 8), (0, 4), (4, 8), (7, 8)):
        inputs = (x, ids, weights, gate_up[first:last].contiguous(), down[first:last].contiguous())
        found = ops.moe_experts(*(one.npu() for one in inputs), first)
        torch.testing.assert_close(found.cpu(), torch_moe.moe_experts(*inputs, "silu", first), rtol=1e-2, atol=0.15)


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, 8]; the place of an expert among the chosen says nothing."""
    return torch.zeros(weights.shape[0], 8).scatter_(1, ids.long(), weights)


def check_quantised(ops: ModuleType) -> None:
    torch.manual_seed(5)
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = torch.randn(6, 32).to(dtype), torch.randint(-127, 128, (24, 32), dtype=torch.int8)
        x[3] = 0
        scale = torch.rand(24) / 100
        quantised, x_scale = ops.dynamic_quant(x.npu())
        expected, expected_scale = torch_quant.dynamic_quant(x)
        assert (quantised.cpu().int() - expected.int()).abs().max() <= 1
        same(x_scale, expected_scale)
        found = ops.quant_matmul(quantised, x_scale, ops.pack_quantized(weight.npu()), scale.npu(), dtype)
        packed = torch_quant.pack_quantized(weight)
        wanted = torch_quant.quant_matmul(quantised.cpu(), x_scale.cpu(), packed, scale, dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu(), wanted)
        whole = x.float() @ (weight.float() * scale.unsqueeze(1)).t()
        torch.testing.assert_close(found.cpu().float(), whole, rtol=0.1, atol=0.15)


def check_rotary(ops: ModuleType) -> None:
    qkv = torch.randn(7, (HEADS + 2 * KV) * DIM).half()
    positions = torch.tensor([3, 0, 9, 4, 4, 1, 8])
    norms = [torch.rand(DIM).half() for _ in range(2)]
    for turned in (DIM, DIM // 2):
        angles = torch.rand(10, turned // 2) * 6
        table = torch.cat((angles.cos(), angles.sin()), -1)  # [positions, turned] float32
        for given in ([], [*norms, 1e-3]):
            inputs = [qkv, positions, table, HEADS, KV, *given]
            kernels = dispatch.calls["triton::rotary_kernel"]
            on_device = [one.npu() if isinstance(one, torch.Tensor) else one for one in inputs]
            same(ops.rotary(*on_device), torch_ops.rotary(qkv.clone(), *inputs[1:]))
            assert dispatch.calls["triton::rotary_kernel"] == kernels + (turned < DIM)
    heads, table = qkv.view(7, -1, DIM), torch.cat(((a := torch.rand(10, DIM // 2) * 6).cos(), a.sin()), -1)
    same(ops.rotary_pairs(heads.npu(), positions.npu(), table.npu()), torch_ops.rotary_pairs(heads, positions, table))


def metadata(device: str) -> AttentionMetadata:
    """`ROWS`, each with blocks of its own from 1 on."""
    new = np.array([n for _, n in ROWS], np.int32)
    lengths = np.array([before + n for before, n in ROWS], np.int32)
    table = torch.arange(1, 1 + 4 * len(ROWS), dtype=torch.int32).view(len(ROWS), 4)
    slots = [int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for i, (b, n) in enumerate(ROWS) for p in range(b, b + n)]
    starts = np.concatenate(([0], new.cumsum())).astype(np.int32)
    return AttentionMetadata(
        num_decodes=0, num_prefills=len(ROWS), query_start=torch.tensor(starts).to(device),
        seq_lens=torch.tensor(lengths).to(device), block_table=table.to(device),
        slot_mapping=torch.tensor(slots).to(device), query_start_host=starts, seq_lens_host=lengths, max_seq_len=64)


def check_attention(module: ModuleType) -> None:
    torch.manual_seed(2)
    tokens = sum(n for _, n in ROWS)
    query, key, value = (torch.randn(tokens, heads, DIM).half() for heads in (HEADS, KV, KV))
    history = torch.randn(2, 17, BLOCK, KV, DIM).half()
    for window in (0, 6):
        layer = LayerAttention(0, DIM**-0.5, sliding_window=window)
        outputs = []
        for kind, device in ((torch_attention.TorchAttention, "cpu"), (module.NpuAttention, "npu")):
            backend = kind(AttentionSpec(1, HEADS, KV, DIM, BLOCK, torch.float16, torch.device(device)))
            backend.allocate_kv_caches(17)
            backend.key_caches[0].copy_(history[0])
            backend.value_caches[0].copy_(history[1])
            backend.prepare(metadata(device))
            outputs.append(backend.forward(layer, *(t.to(device) for t in (query, key, value))).cpu())
            outputs.append(backend.key_caches[0].cpu())
        same(outputs[2], outputs[0])
        assert torch.equal(outputs[1], outputs[3])


def test_operators_equal_the_reference() -> None:
    check_operators(npu_ops)


def test_experts_equal_the_reference() -> None:
    check_experts(npu_moe)


def test_quantised_products_equal_the_reference() -> None:
    check_quantised(npu_quant)


def test_attention_equals_the_reference() -> None:
    check_attention(npu_attention)


CHECKS: dict[ModuleType, Callable[[ModuleType], None]] = {
    npu_ops: check_operators, npu_attention: check_attention, npu_moe: check_experts, npu_quant: check_quantised}
MUTATIONS: list[tuple[ModuleType, str, str]] = [
    (npu_ops, "npu_rms_norm(x, weight, eps)", "npu_rms_norm(weight, x, eps)"),
    (npu_ops, "npu_rms_norm(x, weight, eps)", "npu_rms_norm(x, weight)"),
    (npu_ops, "npu_rms_norm(x, weight, eps)", "npu_rms_norm(x, weight, eps=eps)"),
    (npu_ops, "npu_add_rms_norm(x, residual, weight, eps)", "npu_add_rms_norm(x, weight, residual, eps)"),
    (npu_ops, "npu_add_rms_norm(x, residual, weight, eps)", "npu_add_rms_norm(x, residual, weight, eps * 1000)"),
    (npu_ops, "normed, _, total =", "normed, total, _ ="),
    (npu_ops, '_kernel("add_rms_norm")', "None"),
    (npu_ops, '_kernel("rms_norm")', "None"),
    (npu_ops, '_kernel("rotary")', "None"),
    (npu_ops, "npu_rotary_mul(query.contiguous(), cos, sin)", "npu_rotary_mul(query.contiguous(), sin, cos)"),
    (npu_ops, "npu_rotary_mul(key.contiguous(), cos, sin)", "npu_rotary_mul(key.contiguous(), cos, sin, 'interleave')"),
    (npu_ops, "cos_sin[positions].to(qkv.dtype)", "cos_sin[positions]"),
    (npu_ops, "torch.cat((cos, cos), dim=-1)", "torch.cat((cos, sin), dim=-1)"),
    (npu_ops, "npu_swiglu(x)", "npu_swiglu(x, 0)"),
    (npu_ops, "npu_swiglu(x)", "npu_swiglu(x=x)"),
    (npu_ops, 'rotary_mode="interleave"', 'rotary_mode="half"'),
    (npu_ops, "repeat_interleave(2, dim=-1)", "repeat(1, 2)"),
    (npu_ops, "top_p.to(logits.dtype), top_k)", "top_k, top_p.to(logits.dtype))"),
    (npu_ops, "top_p.to(logits.dtype), top_k)", "top_p, top_k)"),
    (npu_ops, "top_p.to(logits.dtype), top_k)", "None, top_k)"),
    (npu_ops, "top_p.to(logits.dtype), top_k)", "top_p.to(logits.dtype), top_k.long())"),
    (npu_moe, "\n            logits, moe.top_k,", "\n            moe.top_k, logits,"),
    (npu_moe, "bias=bias, ", ""),
    (npu_moe, "k_group=moe.top_groups if grouped else 1", "k_group=1"),
    (npu_moe, "group_count=moe.num_groups if grouped", "group_count=1 if grouped"),
    (npu_moe, "_BEST_EXPERT, _BEST_TWO = 0, 1", "_BEST_EXPERT, _BEST_TWO = 1, 0"),
    (npu_moe, "_SIGMOID = 1", "_SIGMOID = 0"),
    (npu_moe, ",\n            routed_scaling_factor=moe.scaling_factor)", ")"),
    (npu_moe, "(logits, None, k=moe.top_k)", "(logits, None, k=moe.top_k + 1)"),
    (npu_moe, "(logits, None, k=moe.top_k)", "(logits, moe.top_k, None)"),
    (npu_moe, "expert_tokens_num_type=_COUNTS", "expert_tokens_num_type=0"),
    (npu_moe, "expert_tokens_num_flag=True, ", ""),
    (npu_moe, "active_expert_range=[0, count]", "active_expert_range=[0, count + 1]"),
    (npu_moe, "quant_mode=_NOT_QUANTISED", "quant_mode=0"),
    (npu_moe, "row_idx_type=0", "row_idx_type=1"),
    (npu_moe, "active_num=num_tokens * top_k", "active_num=num_tokens"),
    (npu_moe, "x, local, active_num", "local, x, active_num"),
    (npu_moe, "group_list_type=_COUNTS, ", ""),
    (npu_moe, "group_type=_BY_ROWS, ", ""),
    (npu_moe, "_ONE_MATRIX = 0, 2", "_ONE_MATRIX = 0, 0"),
    (npu_moe, "matrices.transpose(1, 2)", "matrices"),
    (npu_moe, "npu_swiglu(_grouped(rows, gate_up, tokens))", "npu_swiglu(_grouped(rows, gate_up, tokens), 0)"),
    (npu_moe, "torch.where(place < tokens.sum(), outer, 0)", "outer"),
    (npu_moe, "where.view(num_tokens, top_k) >= 0, weights, 0", "where.view(num_tokens, top_k) >= 0, 1.0, 0"),
    (npu_moe, "where.clamp(min=0)", "where"),
    (npu_moe, ".to(x.dtype)\n    return", "\n    return"),
    (npu_moe, "_TOKEN_MAJOR = 2", "_TOKEN_MAJOR = 0"),
    (npu_moe, "outer, None, None, None, share, where", "outer, None, None, share, None, where"),
    (npu_quant, "npu_dynamic_quant(x)", "npu_dynamic_quant(x.float())"),
    (npu_quant, "quantized, scale = torch", "scale, quantized = torch"),
    (npu_quant, "_FRACTAL_NZ = 29", "_FRACTAL_NZ = 30"),
    (npu_quant, "weight.t().contiguous(), _FRACTAL_NZ", "_FRACTAL_NZ, weight.t().contiguous()"),
    (npu_quant, "weight.t().contiguous()", "weight"),
    (npu_quant, "npu_quant_matmul(x, packed,", "npu_quant_matmul(packed, x,"),
    (npu_quant, "weight_scale, pertoken_scale=x_scale", "x_scale, pertoken_scale=weight_scale"),
    (npu_quant, "pertoken_scale=x_scale, ", ""),
    (npu_quant, ", output_dtype=dtype", ""),
    (npu_quant, "output_dtype=dtype", "output_dtype=torch.float16"),
    (npu_attention, "slot_mapping.to(torch.int32)", "slot_mapping.to(torch.float32)"),
    (npu_attention, 'cache_mode="Norm"', 'cache_mode="PA_NZ"'),
    (npu_attention, "key.contiguous(), value.contiguous()", "value.contiguous(), key.contiguous()"),
    (npu_attention, "self.value_caches[layer], self._slots", "self.key_caches[layer], self._slots"),
    (npu_attention, "query_start_host[1:]", "query_start_host[:-1]"),
    (npu_attention, '"actual_seq_kvlen": self._key_lengths', '"actual_seq_kvlen": self._query_ends'),
    (npu_attention, '"actual_seq_kvlen": ', '"actual_seq_lengths_kv": '),
    (npu_attention, "diagonal=1", "diagonal=0"),
    (npu_attention, "dtype=torch.int8", "dtype=torch.float16"),
    (npu_attention, '"atten_mask": self._mask, ', ""),
    (npu_attention, '"softmax_scale": layer.scale, ', ""),
    (npu_attention, '"num_key_value_heads": spec.num_kv_heads', '"num_key_value_heads": spec.num_heads'),
    (npu_attention, '"block_size": spec.block_size', '"block_size": 128'),
    (npu_attention, "_CAUSAL, _BAND = 3, 4", "_CAUSAL, _BAND = 4, 3"),
    (npu_attention, "layer.sliding_window - 1", "layer.sliding_window"),
    (npu_attention, '"next_tokens": 0 if', '"next_tokens": 1 if'),
    (npu_attention, '"input_layout": "TND"', '"input_layout": "BSH"'),
]


@pytest.mark.parametrize(("module", "old", "new"), MUTATIONS, ids=[new or f"no {old}" for _, old, new in MUTATIONS])
def test_a_changed_call_fails_the_check(module: ModuleType, old: str, new: str) -> None:
    with pytest.raises((RuntimeError, TypeError, AssertionError)):
        CHECKS[module](mutated(module, old, new))
