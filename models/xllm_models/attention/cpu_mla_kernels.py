"""Kernels of latent attention on the CPU: absorb queries, attend to the paged latents as they lie, project the sums.

A layer's cache is [blocks, block_size, E], E = C + R: one row is the key of every head, its first C values are the
value. Heads are rows of one product with the tile of latents in hand, `groups` of them at a time, so that a tile read
once (to float32, in cache) serves them all. Absorbed queries and sums of latents are float32.
Kernels are C functions run by a team of threads (ops.cpu_team); argument lists are documented at each and written by
cpu_mla only.
"""
# mypy: disable-error-code="no-untyped-def, type-var, call-overload"

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types
from numba.extending import overload

from xllm_models.attention.cpu_kernels import LOWEST, add_values, merge, soften
from xllm_models.attention.cpu_vector import LANES, dots_bfloat, dots_float, values_float
from xllm_models.ops.cpu_numeric import (
    BFLOAT16,
    FAST,
    FLOAT16,
    arguments_of,
    double_of,
    f32,
    i16,
    i32,
    i64,
    load,
    store,
    u16,
)
from xllm_models.ops.cpu_team import team_barrier, team_rank, team_share, team_size

ABSORB_STRIP, PROJECT_STRIP = 128, 32  # columns of U_K, rows of U_V that one thread takes at a time


@njit(error_model="numpy", fastmath=FAST)
def _write_tokens(latent, slots, cache):
    """latent [T, E], cache [blocks, block_size, E]"""
    block_size, width = cache.shape[1], cache.shape[2]
    begin, end = team_share(slots.size)
    for token in range(begin, end):
        source, target = latent[token], cache[slots[token] // block_size, slots[token] % block_size]
        for e in range(width):
            store(target, e, load(source, e))


@njit(error_model="numpy", fastmath=FAST)
def _decode(query, cache, table, lengths, out, scale, tile, parts, part_rows):
    """One token a row; query [D, H, E], out [D, H, C] float32. Work is tiles of positions, cut evenly over the threads.

    A row here is `groups` heads of one token; one that is cut between threads leaves its parts as in cpu_kernels.
    """
    block_size, width = cache.shape[1], cache.shape[2]
    heads, size, groups = out.shape[1], out.shape[2], parts.shape[1]
    sets = heads // groups
    padded = (width + LANES - 1) // LANES * LANES
    padded_size = (size + LANES - 1) // LANES * LANES
    rank = team_rank()
    part_rows[2 * rank], part_rows[2 * rank + 1] = -1, -1
    units = 0
    for b in range(lengths.size):
        units += (lengths[b] + tile - 1) // tile * sets
    begin, end = team_share(units)
    wide = np.zeros((tile + 1, padded), np.float32)  # the tile in hand; columns past the width stay zero
    scores, q = np.empty((groups, tile + 1), np.float32), np.zeros((groups, padded), np.float32)
    peak, total = np.empty(groups, np.float32), np.empty(groups, np.float32)
    wide_sums = np.empty((groups, padded_size), np.float32)
    sums, scratch = wide_sums[:, :size], np.empty((groups, size), np.float32)
    at, slot = 0, 2 * rank
    for row in range(lengths.size * sets):
        b, first_head = row // sets, row % sets * groups
        length = np.int64(lengths[b])
        count = (length + tile - 1) // tile
        low_tile, high_tile = max(begin - at, 0), min(end - at, count)
        at += count
        if at <= begin or low_tile >= high_tile:
            continue
        for g in range(groups):
            peak[g], total[g] = LOWEST, np.float32(0)
            source, target = query[b, first_head + g], q[g]
            for e in range(width):
                target[e] = source[e] * scale
        wide_sums[:] = np.float32(0)
        for t in range(low_tile, high_tile):
            position = t * tile
            latents, inside = cache[table[b, position // block_size]], position % block_size
            n = min(length - position, tile)
            for i in range(n):
                source, target = latents[inside + i], wide[i]
                for e in range(width):
                    target[e] = load(source, e)
            dots_float(groups, n, q.ctypes.data, padded, wide.ctypes.data, padded, padded, scores.ctypes.data, tile + 1)
            soften(scores, n, peak, total, wide_sums)
            values_float(groups, padded_size, scores.ctypes.data, tile + 1, wide.ctypes.data, padded, n,
                         wide_sums.ctypes.data, padded_size)
        if low_tile == 0 and high_tile == count:
            for g in range(groups):
                inverse, target = np.float32(1) / total[g], out[b, first_head + g]
                for e in range(size):
                    target[e] = sums[g, e] * inverse
        else:
            part_rows[slot] = row
            for g in range(groups):
                parts[slot, g, :size] = sums[g]
                parts[slot, g, size], parts[slot, g, size + 1] = peak[g], total[g]
            slot += 1
    team_barrier()
    merge(parts, part_rows, out, sets, scratch, scratch)


@njit(error_model="numpy", fastmath=FAST)
def _step(latent, query, out, cache, a):
    """Write all tokens, then decode the first `rows` of them."""
    _write_tokens(latent, i64(a[2], a[3]), cache)
    rows = a[8]
    if rows > 0:
        team_barrier()
        parts = f32(a[13], (2 * np.int64(team_size()), a[15], a[18] + 2))
        part_rows = i64(a[14], 2 * np.int64(team_size()))
        scale = np.float32(double_of(a[12]))
        _decode(query, cache, i32(a[9], (rows, a[10])), i32(a[11], rows), out, scale, a[16], parts, part_rows)


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def step(data):
    """0 encoding of latents, 1 latents, 2 slots, 3 tokens, 4 cache, 5 blocks, 6 block size, 7 E,

    8 decode rows, 9 table, 10 its width, 11 lengths, 12 scale, 13 parts, 14 part rows, 15 heads in a group, 16 tile,
    17 H, 18 C, 19 query, 20 out, 21 encoding of the cache
    """
    a = arguments_of(data)
    new, shape = (a[3], a[7]), (a[5], a[6], a[7])
    query, out = f32(a[19], (a[8], a[17], a[7])), f32(a[20], (a[8], a[17], a[18]))
    if a[0] == BFLOAT16:
        _step(u16(a[1], new), query, out, u16(a[4], shape), a)
    elif a[21] == FLOAT16:
        _step(f32(a[1], new), query, out, i16(a[4], shape), a)
    else:
        _step(f32(a[1], new), query, out, f32(a[4], shape), a)


@njit(error_model="numpy", fastmath=FAST)
def _absorb(query, up, rope, nope, out):
    """query [n, H, R + P], up [H, P + V, C] -> out [n, H, C + R]; work is strips of C in each head."""
    n, heads, size = query.shape[0], query.shape[1], up.shape[2]
    strips = (size + ABSORB_STRIP - 1) // ABSORB_STRIP
    begin, end = team_share(heads * strips)
    q, wide = np.empty((n, nope), np.float32), np.empty((4, ABSORB_STRIP), np.float32)
    for unit in range(begin, end):
        head, low = unit // strips, unit % strips * ABSORB_STRIP
        high = min(low + ABSORB_STRIP, size)
        for row in range(n):
            source, target = query[row, head], q[row]
            for p in range(nope):
                target[p] = load(source, rope + p)
            if low == 0:
                for r in range(rope):
                    out[row, head, size + r] = load(source, r)
        part = np.zeros((n, high - low), np.float32)  # its rows lie side by side, as add_values expects
        add_values(q, up[head, :nope, low:high], nope, wide, part)
        for row in range(n):
            out[row, head, low:high] = part[row]


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def absorb(data):
    """0 encoding of queries and matrices, 1 query, 2 rows, 3 H, 4 R, 5 P, 6 up, 7 V, 8 C, 9 out (float32)"""
    a = arguments_of(data)
    query, up = (a[2], a[3], a[4] + a[5]), (a[3], a[5] + a[7], a[8])
    out = f32(a[9], (a[2], a[3], a[8] + a[4]))
    if a[0] == BFLOAT16:
        _absorb(u16(a[1], query), u16(a[6], up), a[4], a[5], out)
    else:
        _absorb(f32(a[1], query), f32(a[6], up), a[4], a[5], out)


def _dots(rows, matrix, out):
    """out[r, c] = rows[r] . matrix[c] over the first values of each; returns how many."""
    raise TypeError("compiled code only")


@overload(_dots, inline="always")
def _dots_of(rows, matrix, out):
    run = dots_bfloat if matrix.dtype == types.uint16 else dots_float

    def dots(rows, matrix, out):
        return run(rows.shape[0], matrix.shape[0], rows.ctypes.data, rows.strides[0] // rows.itemsize,
                   matrix.ctypes.data, matrix.shape[1], matrix.shape[1], out.ctypes.data, out.shape[1])

    return dots


@njit(error_model="numpy", fastmath=FAST)
def _project(attended, up, nope, out):
    """attended [n, H, C], up [H, P + V, C] -> out [n, H, V]; work is strips of V in each head."""
    n, heads, size = attended.shape
    values = up.shape[1] - nope
    strips = (values + PROJECT_STRIP - 1) // PROJECT_STRIP
    begin, end = team_share(heads * strips)
    sums = np.empty((n, PROJECT_STRIP), np.float32)
    for unit in range(begin, end):
        head, low = unit // strips, unit % strips * PROJECT_STRIP
        high = min(low + PROJECT_STRIP, values)
        matrix = up[head, nope + low : nope + high]
        done = _dots(attended[:, head], matrix, sums)
        for row in range(n):
            target = out[row, head]
            for v in range(high - low):
                total = sums[row, v]
                for c in range(done, size):
                    total += attended[row, head, c] * load(matrix[v], c)
                store(target, low + v, total)


@cfunc("void(voidptr)", cache=True, error_model="numpy", fastmath=FAST)
def project(data):
    """0 encoding of matrices and out, 1 attended (float32), 2 rows, 3 H, 4 C, 5 up, 6 P, 7 V, 8 out"""
    a = arguments_of(data)
    attended, up, out = f32(a[1], (a[2], a[3], a[4])), (a[3], a[6] + a[7], a[4]), (a[2], a[3], a[7])
    if a[0] == BFLOAT16:
        _project(attended, u16(a[5], up), a[6], u16(a[8], out))
    else:
        _project(attended, f32(a[5], up), a[6], f32(a[8], out))
