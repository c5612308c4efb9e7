"""Paged attention kernels for the CPU: write K and V, decode in place. Prefill's are in cpu_prefill.

A layer's key cache is [blocks, K, E, block_size]: a block's keys stand side by side, so one query dimension at a time
multiplies a whole vector of positions and no sum runs across a vector. Its value cache is [blocks, K, block_size, E].
Kernels are C functions run by a team of threads (ops.cpu_team); dtypes are encodings (ops.cpu_numeric). Argument
lists are documented at each kernel and written by cpu_attention only.
"""
# mypy: disable-error-code="no-untyped-def, type-var, call-overload"

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types
from numba.extending import overload

from xllm_models.attention.cpu_vector import scores_bfloat, scores_float, values_bfloat, values_float
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
    i64,
    load,
    store,
    tanh32,
    u16,
)
from xllm_models.ops.cpu_team import team_barrier, team_rank, team_share, team_size

LOWEST = np.float32(-3.0e38)


@njit(error_model="numpy", fastmath=FAST)
def _write_tokens(key, value, stride, slots, keys, values):
    """key, value: flat, `stride` values between tokens; keys [blocks, K, E, S], values [blocks, K, S, E]"""
    num_kv_heads, size, block_size = keys.shape[1], keys.shape[2], keys.shape[3]
    begin, end = team_share(slots.size)
    for token in range(begin, end):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            key_block, value_row = keys[block, head], values[block, head, offset]
            source = token * stride + head * size
            for e in range(size):
                store(key_block[e], offset, load(key, source + e))
            for e in range(size):
                store(value_row, e, load(value, source + e))


# In these three, n positions start at index 0 of every argument: a loop from a computed bound could, for all the
# compiler knows, be negative, and Python's negative indices would cost the vectorisation.


def _vector_scores(query, key_block, n, scores):
    """scores[g, i] = query[g] . key_block[:, i] for the first positions; returns how many."""
    raise TypeError("compiled code only")


@overload(_vector_scores, inline="always")
def _vector_scores_of(query, key_block, n, scores):
    if key_block.dtype == types.int16:  # float16 takes the plain loops
        return lambda query, key_block, n, scores: 0
    run = scores_bfloat if key_block.dtype == types.uint16 else scores_float

    def vectors(query, key_block, n, scores):
        stride = key_block.strides[0] // key_block.itemsize
        return run(query.shape[0], n, query.ctypes.data, query.shape[1], key_block.ctypes.data, stride, query.shape[1],
                   scores.ctypes.data, scores.shape[1])

    return vectors


def _vector_values(scores, value_block, n, sums):
    """sums[g, e] += sum over i of scores[g, i] * value_block[i, e] for the first dimensions; returns how many."""
    raise TypeError("compiled code only")


@overload(_vector_values, inline="always")
def _vector_values_of(scores, value_block, n, sums):
    if value_block.dtype == types.int16:
        return lambda scores, value_block, n, sums: 0
    run = values_bfloat if value_block.dtype == types.uint16 else values_float

    def vectors(scores, value_block, n, sums):
        stride = value_block.strides[0] // value_block.itemsize
        return run(scores.shape[0], sums.shape[1], scores.ctypes.data, scores.shape[1], value_block.ctypes.data, stride,
                   n, sums.ctypes.data, sums.shape[1])

    return vectors


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _scores(query, key_block, n, wide, scores):
    """scores[g, i] = query[g] . key_block[:, i]; `wide` [4, tile] is room for converted keys."""
    done = _vector_scores(query, key_block, n, scores)
    if done < n:
        _plain_scores(query, key_block[:, done:], n - done, wide, scores[:, done:])


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _plain_scores(query, key_block, n, wide, scores):
    groups, size = query.shape
    for g in range(groups):
        for i in range(n):
            scores[g, i] = np.float32(0)
    for quad in range(size // 4):
        e = 4 * quad
        for j in range(4):
            row, source = wide[j], key_block[e + j]
            for i in range(n):
                row[i] = load(source, i)
        k0, k1, k2, k3 = wide[0], wide[1], wide[2], wide[3]
        for g in range(groups):
            q0, q1, q2, q3 = query[g, e], query[g, e + 1], query[g, e + 2], query[g, e + 3]
            row = scores[g]
            for i in range(n):
                row[i] += q0 * k0[i] + q1 * k1[i] + q2 * k2[i] + q3 * k3[i]
    for e in range(size // 4 * 4, size):
        source = key_block[e]
        for g in range(groups):
            q, row = query[g, e], scores[g]
            for i in range(n):
                row[i] += q * load(source, i)


@njit(error_model="numpy", fastmath=FAST)
def _cap(scores, n, softcap):
    for g in range(scores.shape[0]):
        row = scores[g]
        for i in range(n):
            row[i] = softcap * tanh32(row[i] / softcap)


@njit(error_model="numpy", fastmath=FAST, inline="always")
def soften(scores, n, peak, total, sums):
    """Scores become weights relative to the highest score so far; earlier sums are rescaled to it."""
    for g in range(scores.shape[0]):
        row, top = scores[g], peak[g]
        for i in range(n):
            top = max(top, row[i])
        scale = exp32(peak[g] - top)
        part = np.float32(0)
        for i in range(n):
            row[i] = exp32(row[i] - top)
            part += row[i]
        peak[g] = top
        total[g] = total[g] * scale + part
        if scale != np.float32(1):
            for e in range(sums.shape[1]):
                sums[g, e] *= scale


@njit(error_model="numpy", fastmath=FAST, inline="always")
def add_values(scores, value_block, n, wide, sums):
    """sums[g] += sum over i of scores[g, i] * value_block[i]; `wide` [4, E] is room for converted values."""
    done = _vector_values(scores, value_block, n, sums)
    if done < sums.shape[1]:
        _plain_values(scores, value_block[:, done:], n, wide, sums[:, done:])


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _plain_values(scores, value_block, n, wide, sums):
    groups, size = sums.shape
    for quad in range(n // 4):
        i = 4 * quad
        for j in range(4):
            row, source = wide[j], value_block[i + j]
            for e in range(size):
                row[e] = load(source, e)
        v0, v1, v2, v3 = wide[0], wide[1], wide[2], wide[3]
        for g in range(groups):
            p0, p1, p2, p3 = scores[g, i], scores[g, i + 1], scores[g, i + 2], scores[g, i + 3]
            row = sums[g]
            for e in range(size):
                row[e] += p0 * v0[e] + p1 * v1[e] + p2 * v2[e] + p3 * v3[e]
    for i in range(n // 4 * 4, n):
        source = value_block[i]
        for g in range(groups):
            p, row = scores[g, i], sums[g]
            for e in range(size):
                row[e] += p * load(source, e)


@njit(error_model="numpy", fastmath=FAST, inline="always")
def _first_key(length, window):
    return max(length - window, 0) if window > 0 else 0


@njit(error_model="numpy", fastmath=FAST)
def _decode(query, stride, keys, values, table, lengths, out, scale, window, tile, parts, part_rows, softcap, sinks):
    """One token a row. Work is tiles of positions, cut evenly over the threads wherever rows end.

    A row's softmax begins with its head's sink, if `sinks` [H] is not empty: a weight of 1 at that score, and no value.

    query flat, `stride` between rows; table [B, M]; lengths [B]; out [B, H, E]; a row cut between threads leaves its
    parts in parts [2 * threads, G, E + 2] (sums, then peak and total), at most two a thread, named in part_rows.
    """
    num_kv_heads, size, block_size = keys.shape[1], keys.shape[2], keys.shape[3]
    groups = out.shape[1] // num_kv_heads
    rank = team_rank()
    part_rows[2 * rank], part_rows[2 * rank + 1] = -1, -1
    units = 0  # tiles in all
    for b in range(lengths.size):
        units += ((lengths[b] + tile - 1) // tile - _first_key(lengths[b], window) // tile) * num_kv_heads
    begin, end = team_share(units)
    wide_keys, wide_values = np.empty((4, tile), np.float32), np.empty((4, size), np.float32)
    scores, q = np.empty((groups, tile), np.float32), np.empty((groups, size), np.float32)
    peak, total = np.empty(groups, np.float32), np.empty(groups, np.float32)
    sums = np.empty((groups, size), np.float32)
    at, slot = 0, 2 * rank
    for row in range(lengths.size * num_kv_heads):
        b, head = row // num_kv_heads, row % num_kv_heads
        length = np.int64(lengths[b])
        first = _first_key(length, window)
        first_tile = first // tile
        count = (length + tile - 1) // tile - first_tile
        low_tile, high_tile = max(begin - at, 0), min(end - at, count)
        at += count
        if at <= begin or low_tile >= high_tile:
            continue
        for g in range(groups):
            peak[g], total[g] = LOWEST, np.float32(0)
            if sinks.size > 0 and low_tile == 0:
                peak[g], total[g] = sinks[head * groups + g], np.float32(1)
            for e in range(size):
                q[g, e] = load(query, b * stride + (head * groups + g) * size + e) * scale
                sums[g, e] = np.float32(0)
        for t in range(first_tile + low_tile, first_tile + high_tile):
            position = t * tile
            block, inside = table[b, position // block_size], position % block_size
            low, high = inside + max(first - position, 0), inside + min(length - position, tile)
            _scores(q, keys[block, head, :, low:high], high - low, wide_keys, scores)
            if softcap > 0:
                _cap(scores, high - low, softcap)
            soften(scores, high - low, peak, total, sums)
            add_values(scores, values[block, head, low:high], high - low, wide_values, sums)
        if low_tile == 0 and high_tile == count:
            for g in range(groups):
                inverse, target = np.float32(1) / total[g], out[b, head * groups + g]
                for e in range(size):
                    store(target, e, sums[g, e] * inverse)
        else:
            part_rows[slot] = row
            for g in range(groups):
                parts[slot, g, :size] = sums[g]
                parts[slot, g, size], parts[slot, g, size + 1] = peak[g], total[g]
            slot += 1
    team_barrier()
    merge(parts, part_rows, out, num_kv_heads, sums, q)


@njit(error_model="numpy", fastmath=FAST)
def merge(parts, part_rows, out, num_kv_heads, sums, scratch):
    """Finish rows that were cut: the thread with a row's first part adds the parts of the threads after it."""
    groups, size = sums.shape
    slots = 2 * np.int64(team_size())
    for mine in range(2 * team_rank(), 2 * team_rank() + 2):
        row = part_rows[mine]
        if row < 0:
            continue
        first = True
        for slot in range(mine):
            first = first and part_rows[slot] != row
        if not first:
            continue
        b, head = row // num_kv_heads, row % num_kv_heads
        for g in range(groups):
            peak, total = LOWEST, np.float32(0)
            for slot in range(mine, slots):
                if part_rows[slot] == row:
                    peak = max(peak, parts[slot, g, size])
            sums[g] = np.float32(0)
            for slot in range(mine, slots):
                if part_rows[slot] == row:
                    weight = exp32(parts[slot, g, size] - peak)
                    total += weight * parts[slot, g, size + 1]
                    for e in range(size):
                        sums[g, e] += weight * parts[slot, g, e]
            target = out[b, head * groups + g]
            for e in range(size):
                store(target, e, sums[g, e] / total)


@njit(error_model="numpy", fastmath=FAST)
def _step(key, value, query, out, keys, values, a):
    """Write all tokens, then decode the first `rows` of them."""
    _write_tokens(key, value, a[3], i64(a[4], a[5]), keys, values)
    rows, width, groups = a[12], a[14], a[18] // a[9]
    if rows > 0:
        team_barrier()
        parts = f32(a[19], (2 * np.int64(team_size()), groups, a[10] + 2))
        part_rows = i64(a[20], 2 * np.int64(team_size()))
        scale = np.float32(double_of(a[16]))
        _decode(query, a[3], keys, values, i32(a[13], (rows, width)), i32(a[15], rows), out, scale, a[17],
                a[21], parts, part_rows, np.float32(double_of(a[25])), f32(a[26], a[27]))


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def step(data):
    """0 encoding of q, k, v; 1 key, 2 value, 3 values between their tokens (q's too), 4 slots, 5 tokens,

    6 key cache, 7 value cache, 8 blocks, 9 K, 10 E, 11 block size, 12 decode rows, 13 table, 14 its width, 15 lengths,
    16 scale, 17 window, 18 H, 19 parts, 20 part rows, 21 tile, 22 query, 23 out, 24 encoding of the cache,

    25 softcap (0: none), 26 sinks, 27 their number (0: none)
    """
    a = arguments_of(data)
    key_shape, value_shape = (a[8], a[9], a[10], a[11]), (a[8], a[9], a[11], a[10])
    span, out_shape = a[3] * a[5], (a[12], a[18], a[10])
    if a[0] == BFLOAT16:
        _step(u16(a[1], span), u16(a[2], span), u16(a[22], span), u16(a[23], out_shape), u16(a[6], key_shape),
              u16(a[7], value_shape), a)
    elif a[24] == FLOAT16:
        _step(f32(a[1], span), f32(a[2], span), f32(a[22], span), f32(a[23], out_shape), i16(a[6], key_shape),
              i16(a[7], value_shape), a)
    else:
        _step(f32(a[1], span), f32(a[2], span), f32(a[22], span), f32(a[23], out_shape), f32(a[6], key_shape),
              f32(a[7], value_shape), a)
