"""The NPU operators and the NPU attention of xllm_models against torch's, and against themselves with one call changed.

`MUTATIONS` are edits of their source: another name, order, dtype or value in a call of torch_npu. With each of them the
check of that file fails, so the check would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from xllm_models.attention import npu_attention, torch_attention
from xllm_models.attention.base import AttentionSpec, LayerAttention
from xllm_models.forward_input import AttentionMetadata
from xllm_models.ops import npu_ops, torch_ops

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
    for activation in ("silu", "gelu"):
        same(ops.act_and_mul(x.npu(), activation), torch_ops.act_and_mul(x, activation))
    check_rotary(ops)


def check_rotary(ops: ModuleType) -> None:
    qkv = torch.randn(7, (HEADS + 2 * KV) * DIM).half()
    positions = torch.tensor([3, 0, 9, 4, 4, 1, 8])
    norms = [torch.rand(DIM).half() for _ in range(2)]
    for turned in (DIM, DIM // 2):
        angles = torch.rand(10, turned // 2) * 6
        table = torch.cat((angles.cos(), angles.sin()), -1)  # [positions, turned] float32
        for given in ([], [*norms, 1e-3]):
            inputs = [qkv, positions, table, HEADS, KV, *given]
            on_device = [one.npu() if isinstance(one, torch.Tensor) else one for one in inputs]
            same(ops.rotary(*on_device), torch_ops.rotary(qkv.clone(), *inputs[1:]))


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


def test_attention_equals_the_reference() -> None:
    check_attention(npu_attention)


MUTATIONS: list[tuple[ModuleType, str, str]] = [
    (npu_ops, "npu_rms_norm(x, weight, eps)", "npu_rms_norm(weight, x, eps)"),
    (npu_ops, "npu_rms_norm(x, weight, eps)", "npu_rms_norm(x, weight)"),
    (npu_ops, "npu_rms_norm(x, weight, eps)", "npu_rms_norm(x, weight, eps=eps)"),
    (npu_ops, "npu_add_rms_norm(x, residual, weight, eps)", "npu_add_rms_norm(x, weight, residual, eps)"),
    (npu_ops, "npu_add_rms_norm(x, residual, weight, eps)", "npu_add_rms_norm(x, residual, weight, eps * 1000)"),
    (npu_ops, "normed, _, total =", "normed, total, _ ="),
    (npu_ops, "npu_rotary_mul(query.contiguous(), cos, sin)", "npu_rotary_mul(query.contiguous(), sin, cos)"),
    (npu_ops, "npu_rotary_mul(key.contiguous(), cos, sin)", "npu_rotary_mul(key.contiguous(), cos, sin, 'interleave')"),
    (npu_ops, "cos_sin[positions].to(qkv.dtype)", "cos_sin[positions]"),
    (npu_ops, "torch.cat((cos, cos), dim=-1)", "torch.cat((cos, sin), dim=-1)"),
    (npu_ops, "npu_swiglu(x)", "npu_swiglu(x, 0)"),
    (npu_ops, "npu_swiglu(x)", "npu_swiglu(x=x)"),
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
    check: Callable[[ModuleType], None] = check_operators if module is npu_ops else check_attention
    with pytest.raises((RuntimeError, TypeError, AssertionError)):
        check(mutated(module, old, new))
