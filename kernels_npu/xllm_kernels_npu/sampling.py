"""One token a row by temperature, min_p, top_k and top_p, without sorting and without waiting for the host.

What is kept is what the sampler keeps: each filter is a bound on a logit's distance from the row's maximum, tokens tied
at a bound stay, top_p takes its share of the mass that min_p and top_k leave. A bound is found by bisection: distances
are not negative, so their float32 bits are in their order as integers, and 31 halvings are exact; they end early once
one token is left to decide about. The draw adds Gumbel noise and takes the maximum (arXiv:1411.0030, section 2). A
vector kernel: a program walks over rows, and over a row's tiles once for each halving.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xllm_kernels_npu.cores import vector_programs
from xllm_kernels_npu.kernel import CompileCase, Kernel

TILE_VALUES = 2048  # tokens at once
_LARGEST = tl.constexpr(3.4028234663852886e38)
_HALVINGS = tl.constexpr(31)


@triton.jit
def _clean(source, token, vocab):
    """[TILE] float32: NaN and what lies beyond the vocabulary are -inf, +inf is the largest float."""
    value = tl.load(source + token, mask=token < vocab, other=float("-inf"))
    return tl.minimum(tl.where(value == value, value, float("-inf")), _LARGEST)


@triton.jit
def _distance(source, token, vocab, temperature, top):
    """[TILE] float32: how far under `top`, the row's largest, each logit lies after division by the temperature."""
    return top - tl.minimum(_clean(source, token, vocab) / temperature, _LARGEST)


@triton.jit
def _lowest_id(best, ids, top):
    """int32: the lowest of `ids` [TILE] whose `best` [TILE] is `top`."""
    return tl.min(tl.where(best == top, ids, 2147483647), 0)


@triton.jit
def _mass(source, vocab, temperature, top, limit, TILE: tl.constexpr):
    """float32: the sum of exp(-distance) over distances up to `limit`."""
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        distance = _distance(source, start + tl.arange(0, TILE), vocab, temperature, top)
        mass += tl.where(distance <= limit, tl.exp(-distance), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _bound(source, vocab, temperature, top, high, goal, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The bits of a bound under which lie the fewest nearest tokens, ties together, whose number, or mass, is at least
    `goal`; `high` if no lower bound has that.
    """
    low = high * 0 - 1
    within_low, within_high = goal * 0.0, goal * 0.0 + vocab  # how many tokens
    for _ in range(0, _HALVINGS):
        if (high - low > 1) & (within_high - within_low > 1.0):
            middle = low + (high - low) // 2
            limit = middle.to(tl.float32, bitcast=True)
            counts = tl.zeros([TILE], tl.float32)
            mass = tl.zeros([TILE], tl.float32)
            for start in range(0, vocab, TILE):
                distance = _distance(source, start + tl.arange(0, TILE), vocab, temperature, top)
                near = distance <= limit
                counts += tl.where(near, 1.0, 0.0)
                if BY_MASS:
                    mass += tl.where(near, tl.exp(-distance), 0.0)
            count = tl.sum(counts, 0)
            reached = count
            if BY_MASS:
                reached = tl.sum(mass, 0)
            if reached >= goal:
                high = middle
                within_high = count
            else:
                low = middle
                within_low = count
    return high


@triton.jit(do_not_specialize=["num_rows", "logits_stride", "noise_stride", "vocab"])
def sampling_kernel(
    logits, temperatures, top_k, top_p, limits, noise, tokens, bad_rows, num_rows, logits_stride, noise_stride, vocab,
    TILE: tl.constexpr,
):
    """logits, noise [num_rows, vocab] float32, rows their strides apart; by row: temperatures float32, 0: greedy; top_k
    int32, 0: all; top_p float32; limits float32, the distance that min_p allows, which becomes what all filters allow.
    Writes tokens [num_rows] int64, bad_rows [num_rows] int8.
    """
    lane = tl.arange(0, TILE)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        source = logits + tl.cast(row, tl.int64) * logits_stride
        best = tl.full([TILE], float("-inf"), tl.float32)
        ids = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab, TILE):
            value = _clean(source, start + lane, vocab)
            ids = tl.where(value > best, start + lane, ids)
            best = tl.maximum(value, best)
        largest = tl.max(best, 0)
        token = _lowest_id(best, ids, largest)
        bad = largest == float("-inf")
        temperature = tl.load(temperatures + row)
        if (temperature > 0.0) & (largest > float("-inf")):
            top = tl.minimum(largest / temperature, _LARGEST)
            high = tl.load(limits + row).to(tl.int32, bitcast=True)
            k = tl.load(top_k + row)
            if k > 0:
                high = _bound(source, vocab, temperature, top, high, k.to(tl.float32), False, TILE)
            p = tl.load(top_p + row)
            if p < 1.0:
                goal = p * _mass(source, vocab, temperature, top, high.to(tl.float32, bitcast=True), TILE)
                high = _bound(source, vocab, temperature, top, high, goal, True, TILE)
            limit = high.to(tl.float32, bitcast=True)
            tl.store(limits + row, limit)
            best = tl.full([TILE], float("-inf"), tl.float32)
            ids = tl.zeros([TILE], tl.int32)
            for start in range(0, vocab, TILE):
                distance = _distance(source, start + lane, vocab, temperature, top)
                drawn = tl.load(noise + tl.cast(row, tl.int64) * noise_stride + start + lane,
                                mask=start + lane < vocab, other=0.0)
                score = tl.where(distance <= limit, drawn - distance, float("-inf"))
                ids = tl.where(score > best, start + lane, ids)
                best = tl.maximum(score, best)
            token = _lowest_id(best, ids, tl.max(best, 0))
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(bad_rows + row, bad.to(tl.int8))


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    noise: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [S, V] float32, V under 2^24; temperature [S] float32, 0: greedy; top_k [S] int32, 0: all; top_p [S]
    float32, 1: all; min_p [S] float32, 0: all; noise [S, V] float32, Gumbel(0, 1), finite.

    -> tokens [S] int64; bad rows [S] bool, which have no finite logit and whose token is meaningless, but a valid id;
    limits [S] float32: kept are logits / temperature that far or less from the row's maximum.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(rows, dtype=torch.bool, device=logits.device)
    limits = min_p.log().abs()  # of 0: inf
    if rows:
        sampling_kernel[(vector_programs(logits.device, rows),)](
            logits, temperature, top_k, top_p, limits, noise, tokens, bad.view(torch.int8), rows, logits.stride(0),
            noise.stride(0), vocab, TILE=TILE_VALUES)
    return tokens, bad, limits


def sample_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    noise: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [S], bad rows [S], and what is kept [S, V] bool, by sorting; masses in float64."""
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    top, greedy = logits.max(1)
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    x = (logits / divisor).clamp(max=torch.finfo(torch.float32).max)
    distance = x.amax(1, keepdim=True) - x  # [S, V]
    kept = distance <= min_p.log().neg().unsqueeze(1)
    ordered = distance.sort(dim=1).values
    k = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1]).long().unsqueeze(1)
    kept &= distance <= ordered.gather(1, k - 1)
    among = torch.where(kept, distance, torch.inf).sort(dim=1).values
    mass = torch.nn.functional.pad((-among.double()).exp().cumsum(1), (1, 0))  # [S, V + 1]: of the nearest n
    nearer = mass.gather(1, torch.searchsorted(among, distance))  # [S, V]: of tokens likelier than each
    kept &= (nearer < top_p.unsqueeze(1) * mass[:, -1:]) | (top_p >= 1).unsqueeze(1)
    drawn = torch.where(kept, noise - distance, -torch.inf).argmax(1)
    bad = top == -torch.inf
    return torch.where((temperature > 0) & ~bad, drawn, greedy), bad, kept


KERNELS = (
    Kernel(
        sampling_kernel,
        (CompileCase(
            "fp32",
            {"logits": "*fp32", "temperatures": "*fp32", "top_k": "*i32", "top_p": "*fp32", "limits": "*fp32",
             "noise": "*fp32", "tokens": "*i64", "bad_rows": "*i8",
             **dict.fromkeys(("num_rows", "logits_stride", "noise_stride", "vocab"), "i32")},
            {"TILE": TILE_VALUES}),),
        ub_budget=188 << 10),
)
