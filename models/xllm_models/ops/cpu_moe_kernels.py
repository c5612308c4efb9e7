"""Experts of few tokens on the CPU: every matrix row that is needed is read once, by one thread.

The team shares out the rows of each expert, not the experts, so that the work is even however tokens choose. See
cpu_kernels for how such kernels are run; ops.cpu_moe writes the argument list.
"""
# mypy: disable-error-code="no-untyped-def, type-var, call-overload"

from __future__ import annotations

import math

import numpy as np
from numba import cfunc, njit

from xllm_models.ops.cpu_numeric import BFLOAT16, FAST, arguments_of, exp32, f32, i64, load, u16
from xllm_models.ops.cpu_team import team_barrier, team_share
from xllm_models.ops.torch_moe import SWIGLU_ALPHA, SWIGLU_LIMIT

SILU, GELU, GELU_TANH, CLAMPED_SWIGLU = 0, 1, 2, 3

_ALPHA, _LIMIT = np.float32(SWIGLU_ALPHA), np.float32(SWIGLU_LIMIT)
_ONE = np.float32(1)


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _gated(gate, up, kind):
    if kind == SILU:
        return gate / (_ONE + exp32(-gate)) * up
    if kind == CLAMPED_SWIGLU:
        gate, up = min(gate, _LIMIT), max(min(up, _LIMIT), -_LIMIT)
        return (up + _ONE) * gate / (_ONE + exp32(-gate * _ALPHA))
    if kind == GELU_TANH:  # 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2u))
        u = np.float32(1.5957691216057308) * (gate + np.float32(0.044715) * gate * gate * gate)
        return gate / (_ONE + exp32(-u)) * up
    return np.float32(0.5) * gate * (_ONE + np.float32(math.erf(gate * np.float32(0.7071067811865476)))) * up


@njit(error_model="numpy", fastmath=FAST)
def _dot(row, vector, width):
    total = np.float32(0)
    for i in range(width):
        total += load(row, i) * vector[i]
    return total


@njit(error_model="numpy", fastmath=FAST)
def _dot4(row, a, b, c, d, width):
    """Four products of one matrix row."""
    sum_a, sum_b, sum_c, sum_d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(width):
        value = load(row, i)
        sum_a += value * a[i]
        sum_b += value * b[i]
        sum_c += value * c[i]
        sum_d += value * d[i]
    return sum_a, sum_b, sum_c, sum_d


@njit(error_model="numpy", fastmath=FAST)
def _inner(x, inner, gate_up, bias, experts, starts, tokens, kind):
    """inner [P, I]: activation of gates times ups, for P (expert, token) pairs sorted by expert."""
    width, depth = inner.shape[1], x.shape[1]
    begin, end = team_share(width)
    for group in range(experts.size):
        matrix, first, last = gate_up[experts[group]], starts[group], starts[group + 1]
        for column in range(begin, end):
            gate_row, up_row = matrix[column], matrix[width + column]
            gate_bias = up_bias = np.float32(0)
            if bias.size:
                gate_bias = load(bias[experts[group]], column)
                up_bias = load(bias[experts[group]], width + column)
            pair = first
            while pair + 4 <= last:
                a, b, c, d = x[tokens[pair]], x[tokens[pair + 1]], x[tokens[pair + 2]], x[tokens[pair + 3]]
                gates, ups = _dot4(gate_row, a, b, c, d, depth), _dot4(up_row, a, b, c, d, depth)
                for i in range(4):
                    inner[pair + i, column] = _gated(gates[i] + gate_bias, ups[i] + up_bias, kind)
                pair += 4
            while pair < last:
                row = x[tokens[pair]]
                inner[pair, column] = _gated(_dot(gate_row, row, depth) + gate_bias,
                                             _dot(up_row, row, depth) + up_bias, kind)
                pair += 1


@njit(error_model="numpy", fastmath=FAST)
def _outer(inner, out, down, bias, experts, starts, tokens, weights):
    """out [T, N] += weight * (down x inner), experts in ascending order."""
    width, depth = out.shape[1], inner.shape[1]
    begin, end = team_share(width)
    for group in range(experts.size):
        matrix, first, last = down[experts[group]], starts[group], starts[group + 1]
        for column in range(begin, end):
            row = matrix[column]
            added = load(bias[experts[group]], column) if bias.size else np.float32(0)
            pair = first
            while pair + 4 <= last:
                sums = _dot4(row, inner[pair], inner[pair + 1], inner[pair + 2], inner[pair + 3], depth)
                for i in range(4):
                    out[tokens[pair + i], column] += weights[pair + i] * (sums[i] + added)
                pair += 4
            while pair < last:
                out[tokens[pair], column] += weights[pair] * (_dot(row, inner[pair], depth) + added)
                pair += 1


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def moe_experts(data):
    """encoding of matrices, x, inner, out (all float32; out is zeros), gate_up, down, their biases (0: none), experts,
    starts, tokens (int64), weights (float32), T, N, I, P, E, groups, kind
    """
    a = arguments_of(data)
    rows, hidden, width, pairs, count, groups, kind = a[12], a[13], a[14], a[15], a[16], a[17], a[18]
    x, inner, out = f32(a[1], (rows, hidden)), f32(a[2], (pairs, width)), f32(a[3], (rows, hidden))
    experts, starts, tokens, weights = i64(a[8], groups), i64(a[9], groups + 1), i64(a[10], pairs), f32(a[11], pairs)
    up_biased, down_biased = count if a[6] else 0, count if a[7] else 0
    if a[0] == BFLOAT16:
        _inner(x, inner, u16(a[4], (count, 2 * width, hidden)), u16(a[6], (up_biased, 2 * width)), experts, starts,
               tokens, kind)
        team_barrier()
        _outer(inner, out, u16(a[5], (count, hidden, width)), u16(a[7], (down_biased, hidden)), experts, starts,
               tokens, weights)
    else:
        _inner(x, inner, f32(a[4], (count, 2 * width, hidden)), f32(a[6], (up_biased, 2 * width)), experts, starts,
               tokens, kind)
        team_barrier()
        _outer(inner, out, f32(a[5], (count, hidden, width)), f32(a[7], (down_biased, hidden)), experts, starts,
               tokens, weights)
