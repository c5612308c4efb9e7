"""Row operators for the CPU: norms, rotation, gated activations. Compiled once, then cached on disk by numba.

Each kernel is a C function run by a team of threads over its share of the rows (see cpu_team, cpu_numeric).
Argument lists are documented at each kernel and written by cpu_ops only. Importing this module compiles or loads.
"""
# mypy: disable-error-code="no-untyped-def, type-var, call-overload"

from __future__ import annotations

import math

import numpy as np
from numba import cfunc, njit

from xllm_models.ops.cpu_numeric import (
    BFLOAT16,
    FAST,
    arguments_of,
    double_of,
    exp32,
    f32,
    i64,
    load,
    store,
    u16,
)
from xllm_models.ops.cpu_team import team_share

SILU, GELU, GELU_TANH = 0, 1, 2


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _normalise(source, target, weight, width, eps):
    """target = source * rsqrt(mean square) * weight; the two may be one row."""
    total = np.float32(0)
    for i in range(width):
        value = load(source, i)
        total += value * value
    factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(width) + eps))
    for i in range(width):
        store(target, i, load(source, i) * factor * load(weight, i))


@njit(error_model="numpy", fastmath=FAST)
def _rms_norm_rows(x, out, weight, eps):
    begin, end = team_share(x.shape[0])
    for row in range(begin, end):
        _normalise(x[row], out[row], weight, x.shape[1], eps)


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def rms_norm(data):
    """encoding, x, out, weight, rows, width, eps, encoding of the weight"""
    a = arguments_of(data)
    shape, eps = (a[4], a[5]), np.float32(double_of(a[6]))
    if a[7] == BFLOAT16:
        _rms_norm_rows(u16(a[1], shape), u16(a[2], shape), u16(a[3], a[5]), eps)
    elif a[0] == BFLOAT16:
        _rms_norm_rows(u16(a[1], shape), u16(a[2], shape), f32(a[3], a[5]), eps)
    else:
        _rms_norm_rows(f32(a[1], shape), f32(a[2], shape), f32(a[3], a[5]), eps)


@njit(error_model="numpy", fastmath=FAST)
def _add_rms_norm_rows(x, residual, weight, eps):
    begin, end = team_share(x.shape[0])
    for row in range(begin, end):
        for i in range(x.shape[1]):
            store(residual[row], i, load(residual[row], i) + load(x[row], i))
        _normalise(residual[row], x[row], weight, x.shape[1], eps)


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def add_rms_norm(data):
    """encoding, x (becomes the norm), residual (becomes the sum), weight, rows, width, eps, encoding of the weight"""
    a = arguments_of(data)
    shape, eps = (a[4], a[5]), np.float32(double_of(a[6]))
    if a[7] == BFLOAT16:
        _add_rms_norm_rows(u16(a[1], shape), u16(a[2], shape), u16(a[3], a[5]), eps)
    elif a[0] == BFLOAT16:
        _add_rms_norm_rows(u16(a[1], shape), u16(a[2], shape), f32(a[3], a[5]), eps)
    else:
        _add_rms_norm_rows(f32(a[1], shape), f32(a[2], shape), f32(a[3], a[5]), eps)


@njit(error_model="numpy", fastmath=FAST)
def _act_and_mul_rows(x, out, kind):
    begin, end = team_share(out.shape[0])
    width = out.shape[1]
    for row in range(begin, end):
        gate, up, target = x[row, :width], x[row, width:], out[row]
        if kind == SILU:
            for i in range(width):
                g = load(gate, i)
                store(target, i, g / (np.float32(1) + exp32(-g)) * load(up, i))
        elif kind == GELU_TANH:  # 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2u))
            for i in range(width):
                g = load(gate, i)
                u = np.float32(1.5957691216057308) * (g + np.float32(0.044715) * g * g * g)
                store(target, i, g / (np.float32(1) + exp32(-u)) * load(up, i))
        else:
            for i in range(width):
                g = load(gate, i)
                phi = np.float32(0.5) * (np.float32(1) + np.float32(math.erf(g * np.float32(0.7071067811865476))))
                store(target, i, g * phi * load(up, i))


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def act_and_mul(data):
    """encoding, x, out, rows, width of out, kind"""
    a = arguments_of(data)
    if a[0] == BFLOAT16:
        _act_and_mul_rows(u16(a[1], (a[3], 2 * a[4])), u16(a[2], (a[3], a[4])), a[5])
    else:
        _act_and_mul_rows(f32(a[1], (a[3], 2 * a[4])), f32(a[2], (a[3], a[4])), a[5])


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _rotate(head, cos_sin, half):
    for i in range(half):
        first, second, cos, sin = load(head, i), load(head, i + half), cos_sin[i], cos_sin[i + half]
        store(head, i, first * cos - second * sin)
        store(head, i + half, second * cos + first * sin)


@njit(error_model="numpy", fastmath=FAST)
def _rotary_rows(qkv, positions, cos_sin, num_heads, num_rotated, q_norm, k_norm, eps):
    begin, end = team_share(qkv.shape[0])
    for row in range(begin, end):
        table = cos_sin[positions[row]]
        for h in range(num_rotated):
            head = qkv[row, h]
            if q_norm.size:
                _normalise(head, head, q_norm if h < num_heads else k_norm, head.size, eps)
            _rotate(head, table, cos_sin.shape[1] // 2)


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def rotary(data):
    """encoding, qkv (in place), positions, cos_sin, tokens, H, K, E, P, R, q_norm, k_norm, norm width (0: none), eps,

    encoding of the norms
    """
    a = arguments_of(data)
    shape, eps = (a[4], a[5] + 2 * a[6], a[7]), np.float32(double_of(a[13]))
    positions, table = i64(a[2], a[4]), f32(a[3], (a[8], a[9]))
    if a[14] == BFLOAT16:
        norms = u16(a[10], a[12]), u16(a[11], a[12])
        _rotary_rows(u16(a[1], shape), positions, table, a[5], a[5] + a[6], norms[0], norms[1], eps)
    elif a[0] == BFLOAT16:
        weights = f32(a[10], a[12]), f32(a[11], a[12])
        _rotary_rows(u16(a[1], shape), positions, table, a[5], a[5] + a[6], weights[0], weights[1], eps)
    else:
        weights = f32(a[10], a[12]), f32(a[11], a[12])
        _rotary_rows(f32(a[1], shape), positions, table, a[5], a[5] + a[6], weights[0], weights[1], eps)


@njit(error_model="numpy", fastmath=FAST)
def _norm_and_rotate_rows(x, weight, positions, cos_sin, eps):
    begin, end = team_share(x.shape[0])
    width = weight.size
    for row in range(begin, end):
        latent = x[row, :width]
        _normalise(latent, latent, weight, width, eps)
        _rotate(x[row, width:], cos_sin[positions[row]], cos_sin.shape[1] // 2)


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def norm_and_rotate(data):
    """encoding, x (in place), weight, positions, cos_sin, tokens, C, P, R, eps"""
    a = arguments_of(data)
    shape, eps = (a[5], a[6] + a[8]), np.float32(double_of(a[9]))
    positions, table = i64(a[3], a[5]), f32(a[4], (a[7], a[8]))
    if a[0] == BFLOAT16:
        _norm_and_rotate_rows(u16(a[1], shape), u16(a[2], a[6]), positions, table, eps)
    else:
        _norm_and_rotate_rows(f32(a[1], shape), f32(a[2], a[6]), positions, table, eps)
