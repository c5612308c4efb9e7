"""Which rank holds which experts, and copies of which: from how many tokens visited each, without moving in vain.

Ranks have equally many places. A busy expert gets copies on several ranks, which share its tokens evenly; every expert
is somewhere, and no rank holds two copies of one. Pure numpy: knows neither devices nor how weights move.
Letters: E experts, R ranks, S places a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

EMPTY = -1  # a place without an expert
STAY = 0.05  # of a rank's mean load: how much less balance is accepted where an expert need not move
GAIN = 0.02  # of a rank's mean load: what a new placement has to win at least


def home_placement(num_experts: int, ranks: int, places: int) -> I64:
    """[R, S]: each rank its equal part of the experts, in order, and what places are left empty."""
    found = np.full((ranks, places), EMPTY, np.int64)
    found[:, : num_experts // ranks] = np.arange(num_experts).reshape(ranks, -1)
    return found


def rank_loads(load: npt.ArrayLike, placement: I64) -> F64:
    """load [E] of all copies of each expert -> [R]."""
    load = np.asarray(load, np.float64)
    copies = np.bincount(placement[placement >= 0], minlength=load.size)
    shares = np.append(load / np.maximum(copies, 1), 0.0)  # the last one is EMPTY's
    return np.asarray(shares[placement].sum(axis=1), np.float64)


def cosine(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """1 for equal directions; two loads of nothing are alike."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    norm = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norm if norm else 1.0


def place(load: npt.ArrayLike, now: I64) -> I64:
    """load [E], placement now [R, S] -> a balanced placement; `now` itself where that gains nothing.

    Experts that stay on a rank stay in their place.
    """
    load = np.asarray(load, np.float64)
    mean = load.sum() / now.shape[0]
    if not mean:
        return now
    copies = _copies(load, now.shape[0], now.size)
    found = min((_pack(load, copies, now, stay * mean) for stay in (0.0, STAY)),
                key=lambda p: (_peak(load, p) > (1 + STAY) * mean, moves(p, now), _peak(load, p)))
    return found if _peak(load, found) < _peak(load, now) - GAIN * mean else now


def moves(new: I64, now: I64) -> int:
    """Experts that ranks have to receive."""
    return sum(len(set(a.tolist()) - set(b.tolist()) - {EMPTY}) for a, b in zip(new, now, strict=True))


def _peak(load: F64, placement: I64) -> float:
    return float(rank_loads(load, placement).max())


def _copies(load: F64, ranks: int, places: int) -> I64:
    """[E]: copies of each expert; spare places go, one after the other, to whose copies are the busiest."""
    copies = np.ones(load.size, np.int64)
    for _ in range(places - load.size):
        share = np.where(copies < ranks, load / copies, -1.0)
        busiest = int(share.argmax())
        if share[busiest] < 0:
            break
        copies[busiest] += 1
    return copies


def _pack(load: F64, copies: I64, now: I64, stay: float) -> I64:
    """Copies in order of their load, each to the least loaded rank, or to one that holds it and is nearly that."""
    ranks, places = now.shape
    held = [set(row.tolist()) for row in now]
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks)
    share = load / copies
    for expert in np.argsort(-share, kind="stable").tolist():
        for _ in range(copies[expert]):
            free = [r for r in range(ranks) if len(chosen[r]) < places and expert not in chosen[r]]
            if not free:
                break  # only a further copy of one expert can find no rank; its place stays empty
            least = min(loads[r] for r in free)
            rank = min(free, key=lambda r: (loads[r] > least + stay, expert not in held[r], loads[r]))
            chosen[rank].append(expert)
            loads[rank] += share[expert]
    return np.array([_in_places(new, old) for new, old in zip(chosen, now.tolist(), strict=True)], np.int64)


def _in_places(experts: list[int], old: list[int]) -> list[int]:
    """A rank's experts by place: those that were there keep theirs."""
    row = [expert if expert in experts else EMPTY for expert in old]
    arriving = [expert for expert in experts if expert not in old]
    for place, expert in enumerate(row):
        if expert == EMPTY and arriving:
            row[place] = arriving.pop(0)
    return row
