"""Prefill kernels for the CPU: gather a row's keys and values from the cache, and the masked softmax of its scores.

Layouts and conventions are those of cpu_kernels; argument lists are written by cpu_attention only.
"""
# mypy: disable-error-code="no-untyped-def, type-var, call-overload"

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from xllm_models.ops.cpu_numeric import (
    BFLOAT16,
    FAST,
    FLOAT16,
    arguments_of,
    double_of,
    exp32,
    f32,
    i16,
    i32,
    load,
    store,
    tanh32,
    u16,
)
from xllm_models.ops.cpu_team import team_rank, team_share

_LOWEST = np.float32(-3.0e38)


@njit(error_model="numpy", fastmath=FAST)
def _gather(keys, values, blocks, length, first, key_out, value_out):
    """Positions first..length-1 of one row -> key_out [K, E, length - first], value_out [K, length - first, E]"""
    num_kv_heads, size, block_size = keys.shape[1], keys.shape[2], keys.shape[3]
    units = ((length + block_size - 1) // block_size - first // block_size) * num_kv_heads
    begin, end = team_share(units)
    for unit in range(begin, end):
        head, j = unit % num_kv_heads, first // block_size + unit // num_kv_heads
        key_block, value_block = keys[blocks[j], head], values[blocks[j], head]
        position = j * block_size
        low, high = max(first - position, 0), min(length - position, block_size)
        at, n = position + low - first, high - low
        for e in range(size):
            source, target = key_block[e, low:high], key_out[head, e, at : at + n]
            for i in range(n):
                store(target, i, load(source, i))
        for i in range(n):
            source, target = value_block[low + i], value_out[head, at + i]
            for e in range(size):
                store(target, e, load(source, e))


@njit(error_model="numpy", fastmath=FAST)
def _soften_chunk(scores, scratch, groups, queries, before, window, scale, softcap, sinks):
    """Rows of scores [K * queries * groups, keys] become probabilities in place.

    Query i of a head sees the first before + i + 1 keys, of which the last `window` if that is not 0. A head's sink, if
    there are any (sinks [H]), takes its share of the probability away.
    """
    begin, end = team_share(scores.shape[0])
    wide = scratch[team_rank()]
    for row in range(begin, end):
        high = min(before + (row // groups) % queries + 1, scores.shape[1])
        low = max(high - window, 0) if window > 0 else 0
        seen, n = scores[row, low:high], high - low
        peak = _LOWEST
        for j in range(n):
            wide[j] = load(seen, j) * scale
        if softcap > 0:
            for j in range(n):
                wide[j] = softcap * tanh32(wide[j] / softcap)
        for j in range(n):
            peak = max(peak, wide[j])
        total = np.float32(0)
        if sinks.size > 0:
            sink = sinks[row // (queries * groups) * groups + row % groups]
            peak = max(peak, sink)
            total = exp32(sink - peak)
        for j in range(n):
            wide[j] = exp32(wide[j] - peak)
        for j in range(n):
            total += wide[j]
        inverse = np.float32(1) / total
        for j in range(n):
            store(seen, j, wide[j] * inverse)
        hidden = scores[row, :low]
        for j in range(hidden.size):
            store(hidden, j, np.float32(0))
        hidden = scores[row, high:]
        for j in range(hidden.size):
            store(hidden, j, np.float32(0))


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def gather(data):
    """0 cache encoding, 1 key cache, 2 value cache, 3 blocks, 4 K, 5 E, 6 block size, 7 row's blocks, 8 their number,

    9 length, 10 first, 11 keys out, 12 values out (bfloat16 from bfloat16, else float32)
    """
    a = arguments_of(data)
    key_shape, value_shape = (a[3], a[4], a[5], a[6]), (a[3], a[4], a[6], a[5])
    blocks, count = i32(a[7], a[8]), a[9] - a[10]
    key_out, value_out = (a[4], a[5], count), (a[4], count, a[5])
    if a[0] == BFLOAT16:
        _gather(u16(a[1], key_shape), u16(a[2], value_shape), blocks, a[9], a[10], u16(a[11], key_out),
                u16(a[12], value_out))
    elif a[0] == FLOAT16:
        _gather(i16(a[1], key_shape), i16(a[2], value_shape), blocks, a[9], a[10], f32(a[11], key_out),
                f32(a[12], value_out))
    else:
        _gather(f32(a[1], key_shape), f32(a[2], value_shape), blocks, a[9], a[10], f32(a[11], key_out),
                f32(a[12], value_out))


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def soften_chunk(data):
    """0 encoding of the scores, 1 scores, 2 rows, 3 keys, 4 scratch [threads, keys] float32, 5 threads, 6 H / K,

    7 queries, 8 keys before the first query, 9 window, 10 scale, 11 softcap (0: none), 12 sinks, 13 their number
    """
    a = arguments_of(data)
    scratch, scale = f32(a[4], (a[5], a[3])), np.float32(double_of(a[10]))
    softcap, sinks = np.float32(double_of(a[11])), f32(a[12], a[13])
    if a[0] == BFLOAT16:
        _soften_chunk(u16(a[1], (a[2], a[3])), scratch, a[6], a[7], a[8], a[9], scale, softcap, sinks)
    else:
        _soften_chunk(f32(a[1], (a[2], a[3])), scratch, a[6], a[7], a[8], a[9], scale, softcap, sinks)
