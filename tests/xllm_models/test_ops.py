"""The fast CPU operators against the reference ones, and the compiled arithmetic under them."""

import numpy as np
import pytest
import torch
from numba import cfunc
from xllm_models.ops import cpu_ops, cuda_ops, torch_ops
from xllm_models.ops.cpu_numeric import FAST, arguments_of, exp32, f32, i16, load, store, tanh32, u16
from xllm_models.ops.cpu_team import float_bits, run, team_share

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.bfloat16]


@cfunc("void(voidptr)", error_model="numpy", fastmath=FAST)
def _convert(data):
    """source f32, exp f32, bf16 out, f16 out, f16 back, n: under the fastmath that kernels use"""
    a = arguments_of(data)
    n = a[5]
    x, e, b, h, back = f32(a[0], n), f32(a[1], n), u16(a[2], n), i16(a[3], n), f32(a[4], n)
    begin, end = team_share(n)
    for i in range(begin, end):
        store(e, i, exp32(load(x, i)))
        store(b, i, load(x, i))
        store(h, i, load(x, i))
        store(back, i, load(h, i))


@pytest.mark.parametrize("threads", [1, 2])
def test_conversions_and_exp_match_torch(threads):
    spans = (torch.linspace(-87, 88, 20001), torch.linspace(-1e-4, 1e-4, 20000), torch.linspace(-65000, 65000, 999))
    x = torch.cat(spans)
    e, back = torch.empty_like(x), torch.empty_like(x)
    b, h = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(x.shape, dtype=torch.float16)
    run(_convert.address, threads, *(t.data_ptr() for t in (x, e, b, h, back)), x.numel())
    inside = x.abs() <= 87
    assert torch.allclose(e[inside].double(), x[inside].double().exp(), rtol=3e-7)
    assert torch.equal(b, x.bfloat16())
    assert torch.equal(h, x.half())
    assert torch.equal(back, x.half().float())


@cfunc("void(voidptr)", error_model="numpy", fastmath=FAST)
def _tanh(data):
    """x, out, n"""
    a = arguments_of(data)
    x, out = f32(a[0], a[2]), f32(a[1], a[2])
    for i in range(a[2]):
        out[i] = tanh32(x[i])


def test_tanh_matches_torch():
    x = torch.cat((torch.linspace(-100, 100, 9999), torch.linspace(-1, 1, 9999), torch.linspace(-1e-4, 1e-4, 999)))
    out = torch.empty_like(x)
    run(_tanh.address, 1, x.data_ptr(), out.data_ptr(), x.numel())
    assert torch.allclose(out.double(), x.double().tanh(), rtol=4e-7, atol=0)


def test_a_double_survives_as_bits():
    assert np.array([float_bits(1e-5)]).view(np.float64)[0] == 1e-5


@pytest.mark.parametrize(("dtype", "weight_dtype"), [*zip(DTYPES, DTYPES), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("rows", [1, 3, 67])
@pytest.mark.parametrize("width", [1, 31, 576])
def test_norms(dtype, weight_dtype, rows, width):
    torch.manual_seed(0)
    x, residual = (torch.randn(rows, width).to(dtype) for _ in "xr")
    weight = torch.randn(width).to(weight_dtype)
    close(cpu_ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    expected = torch_ops.add_rms_norm(x, residual, weight, 1e-5)
    for ours in (cuda_ops.add_rms_norm(x, residual, weight, 1e-5), cpu_ops.add_rms_norm(x, residual, weight, 1e-5)):
        close(ours[0], expected[0])
        close(ours[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (5, 96), (40, 200)])
def test_gated_activations(dtype, activation, rows, width):
    torch.manual_seed(0)
    x = 4 * torch.randn(rows, 2 * width).to(dtype)
    close(cpu_ops.act_and_mul(x, activation), torch_ops.act_and_mul(x, activation), scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [None, "alike", torch.float32])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "head_dim", "rotary_dim"),
                         [(1, 9, 3, 64, 64), (70, 2, 2, 16, 16), (5, 4, 1, 32, 16)])
def test_rotary(dtype, normed, rows, heads, kv_heads, head_dim, rotary_dim):
    torch.manual_seed(0)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype)
    positions, table = torch.randint(0, 50, (rows,)), torch.randn(50, rotary_dim)
    kind = dtype if normed == "alike" else normed
    norms = [torch.randn(head_dim).to(kind) for _ in "qk"] if normed else [None, None]
    expected = torch_ops.rotary(qkv.clone(), positions, table, heads, kv_heads, *norms, 1e-6)
    close(cpu_ops.rotary(qkv.clone(), positions, table, heads, kv_heads, *norms, 1e-6), expected, scale=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_packed_linear(dtype, bias, rows):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 80).to(dtype), torch.randn(48, 80).to(dtype)
    offset = torch.randn(48).to(dtype) if bias else None
    packed = cpu_ops.pack_linear(weight)
    if packed is None:
        pytest.skip("oneDNN packs nothing of this dtype for this processor")
    close(cpu_ops.linear_packed(x, packed, offset), torch_ops.linear(x, weight, offset), scale=20)


def close(ours, expected, scale=1.0):
    assert ours.dtype == expected.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)
