"""Moves experts' matrices between ranks while the model is in use: a few at a time aside, then all of a layer at once.

Every rank of an expert-parallel group is told the same placements and calls the same methods at the same time. Until
`finish` the layer works as before. Knows no policy and no steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from xllm_platform.collectives import all_to_all
from xllm_platform.parallel import Group

from xllm_models.layers.moe import SparseMoe

Placement = list[list[int]]  # [R][S]: the expert in each place of each rank, below 0 for none


@dataclass(frozen=True, slots=True)
class Move:
    expert: int
    source: tuple[int, int]  # rank in the group, place there
    target: tuple[int, int]


def plan_moves(now: Placement, new: Placement) -> list[Move]:
    """What ranks have to receive, ordered so that any few neighbours come from and go to different ranks.

    A copy is taken from the rank that has sent least so far.
    """
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(now):
        for slot, expert in enumerate(row):
            holders.setdefault(expert, []).append((rank, slot))
    sent, by_target = [0] * len(now), []
    for rank, row in enumerate(new):
        moves = []
        for slot, expert in enumerate(row):
            if expert >= 0 and expert != now[rank][slot]:
                source = min(holders[expert], key=lambda place: sent[place[0]])
                sent[source[0]] += 1
                moves.append(Move(expert, source, (rank, slot)))
        by_target.append(moves)
    longest = max(map(len, by_target), default=0)
    return [moves[i] for i in range(longest) for moves in by_target if i < len(moves)]


class ExpertMover:
    def __init__(self, layers: list[SparseMoe], group: Group) -> None:
        """Takes memory for what one rank may receive in one layer, for as long as it lives."""
        self.layers, self.group = layers, group
        self._aside = [torch.empty_like(matrix) for matrix in layers[0].experts.matrices()]
        self._received: list[int] = []  # places that what lies aside belongs to, in order

    def move(self, layer: int, moves: list[Move]) -> None:
        """Copy these experts to the ranks that get them, aside."""
        rank = self.group.rank
        sends = sorted((m for m in moves if m.source[0] == rank), key=lambda m: m.target)
        receives = sorted((m for m in moves if m.target[0] == rank), key=lambda m: (m.source[0], m.target))
        sizes = [[sum(m.target[0] == r for m in sends) for r in range(self.group.size)],
                 [sum(m.source[0] == r for m in receives) for r in range(self.group.size)]]
        begin = len(self._received)
        for matrix, aside in zip(self.layers[layer].experts.matrices(), self._aside, strict=True):
            rows = matrix[[m.source[1] for m in sends]].flatten(1)  # [n, numbers of one expert]
            aside[begin : begin + len(receives)].flatten(1).copy_(all_to_all(rows, self.group, *sizes))
        self._received += [m.target[1] for m in receives]

    def forget(self) -> None:
        """What lies aside is not wanted any more."""
        self._received = []

    def finish(self, layer: int, new: Placement) -> None:
        """From now on the layer uses what has come."""
        moe = self.layers[layer]
        assert moe.places is not None
        if self._received:
            for matrix, aside in zip(moe.experts.matrices(), self._aside, strict=True):
                matrix[self._received] = aside[: len(self._received)]
        moe.places.update(new)
        self._received = []
