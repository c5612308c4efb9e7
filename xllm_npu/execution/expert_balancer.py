"""Keeps the ranks of a mixture-of-experts model evenly busy: measures, decides, moves, between the steps of a worker.

All ranks count the same steps, so everything happens on all of them at the same step without a word. At every
`interval` steps rank 0 of the world looks at the loads and tells the others the new placements of those layers whose
load has turned: the cosine between it and that of the layer's last placement is below the threshold. Then a few experts
move after each step, so that no step takes much longer; a layer switches when all of its experts have come.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from xllm_models.layers.expert_moves import ExpertMover, Move, plan_moves
from xllm_models.layers.moe import SparseMoe
from xllm_platform.collectives import all_reduce, broadcast
from xllm_platform.parallel import ParallelState

from xllm_npu.execution.expert_balance import I64, cosine, home_placement, place, rank_loads

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Change:
    layer: int
    new: I64  # [R, S]
    moves: deque[Move]


class ExpertBalancer:
    def __init__(self, model: torch.nn.Module, parallel: ParallelState, interval: int, threshold: float) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, SparseMoe)]
        self.parallel, self.interval, self.threshold = parallel, interval, threshold
        experts, slots = self.layers[0].moe.num_experts, self.layers[0].experts.slots
        self.placements = [home_placement(experts, parallel.ep.size, slots) for _ in self.layers]
        self._placed_for = [np.ones(experts) for _ in self.layers]  # the load of each layer's placement
        self._mover = ExpertMover(self.layers, parallel.ep)
        self._changes: deque[_Change] = deque()
        self._at_once = 0  # moves after one step
        self.steps = 0
        self.updates = 0  # layers whose placement has changed

    @property
    def moving(self) -> bool:
        return bool(self._changes)

    def restart(self) -> None:
        """Forget what was measured so far: warming up is no load."""
        self.steps = 0
        for moe in self.layers:
            if moe.places is not None:
                moe.places.load.zero_()

    def after_step(self) -> None:
        """Once after every step, on every rank."""
        self.steps += 1
        if self._changes:
            self._move()
        elif self.steps % self.interval == 0:
            self._decide()

    def _decide(self) -> None:
        loads = torch.stack([moe.places.load for moe in self.layers if moe.places is not None])  # [L, E]
        if self.parallel.experts.all_to_all:
            all_reduce(loads, self.parallel.world)  # each rank has counted its own rows; else all have counted all
        for moe in self.layers:
            if moe.places is not None:
                moe.places.load.zero_()
        shape = self.placements[0].shape
        told = torch.zeros(len(self.layers), 1 + shape[0] * shape[1], dtype=torch.int64, device=loads.device)
        if self.parallel.world.rank == 0:
            told.copy_(torch.from_numpy(self._plan(loads.cpu().numpy())))
        plan = broadcast(told, self.parallel.world).cpu().numpy()
        for layer in np.flatnonzero(plan[:, 0]).tolist():
            new = plan[layer, 1:].reshape(shape)
            moves = plan_moves(self.placements[layer].tolist(), new.tolist())
            self._changes.append(_Change(layer, new, deque(moves)))
        # Done in half an interval, and at least one expert for each rank a step.
        total = sum(len(change.moves) for change in self._changes)
        self._at_once = max(shape[0], -(-2 * total // self.interval))

    def _plan(self, loads: I64) -> I64:
        """[L, E] -> [L, 1 + R * S]: whether a layer changes, and its placement. Rank 0 only."""
        plan = np.zeros((len(self.layers), 1 + self.placements[0].size), np.int64)
        for layer, load in enumerate(loads):
            if not load.any() or cosine(load, self._placed_for[layer]) >= self.threshold:
                continue
            now = self.placements[layer]
            new = place(load, now)
            self._placed_for[layer] = load.astype(np.float64)
            if new is not now:
                plan[layer, 0], plan[layer, 1:] = 1, new.ravel()
                before, after = rank_loads(load, now), rank_loads(load, new)
                log.info("experts of layer %d move: the busiest rank's load goes from %.2f to %.2f times the mean",
                         self.layers[layer].layer, before.max() / before.mean(), after.max() / after.mean())
        return plan

    def _move(self) -> None:
        change = self._changes[0]
        some = [change.moves.popleft() for _ in range(min(self._at_once, len(change.moves)))]
        if some:
            self._mover.move(change.layer, some)
        if not change.moves:
            self._mover.finish(change.layer, change.new.tolist())
            self.placements[change.layer] = change.new
            self.updates += 1
            self._changes.popleft()
