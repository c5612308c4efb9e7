"""Keeps the ranks of a mixture-of-experts model evenly busy: measures, decides, moves, between the steps of a worker.

All ranks count the same steps, so everything happens on all of them at the same step without a word. At every
`interval` steps loads are measured. After each of the next steps rank 0 of the world plans one layer whose load has
turned (the cosine between it and that of the layer's last placement is below the threshold) and tells the others; then
a few of its experts move after each step, and the layer switches when all have come. No step takes much longer so.
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


_AGAIN, _DONE = -1, -2  # instead of a layer: nothing after this step, and nothing any more


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
        self._change: _Change | None = None
        self._looking = False  # layers are still to be planned
        self._loads: deque[tuple[int, I64]] = deque()  # rank 0: those layers and their loads [E]
        self.steps = 0
        self.updates = 0  # layers whose placement has changed

    @property
    def moving(self) -> bool:
        """Something happens after the next step."""
        return self._looking or self._change is not None

    def restart(self) -> None:
        """Forget what was measured so far: warming up is no load."""
        self.steps = 0
        for moe in self.layers:
            if moe.places is not None:
                moe.places.load.zero_()

    def bring_home(self) -> None:
        """The checkpoint was loaded again, each expert into its first place. On all ranks between the same steps."""
        experts = self.layers[0].moe.num_experts
        self.placements = [home_placement(experts, self.parallel.ep.size, self.layers[0].experts.slots)
                           for _ in self.layers]
        self._placed_for = [np.ones(experts) for _ in self.layers]
        self._change, self._looking = None, False
        self._loads.clear()
        self._mover.forget()
        for moe, placement in zip(self.layers, self.placements):
            if moe.places is not None:
                moe.places.update(placement.tolist())
        self.restart()

    def after_step(self) -> None:
        """Once after every step, on every rank."""
        self.steps += 1
        if self._change is not None:
            self._move(self._change)
        elif self._looking:
            self._look()
        elif self.steps % self.interval == 0:
            self._measure()

    def _measure(self) -> None:
        loads = torch.stack([moe.places.load for moe in self.layers if moe.places is not None])  # [L, E]
        if self.parallel.experts.all_to_all:
            all_reduce(loads, self.parallel.world)  # each rank has counted its own rows; else all have counted all
        for moe in self.layers:
            if moe.places is not None:
                moe.places.load.zero_()
        if self.parallel.world.rank == 0:
            self._loads.extend(enumerate(loads.cpu().numpy()))
        self._looking = True

    def _look(self) -> None:
        shape, device = self.placements[0].shape, self.layers[0].experts.down.device
        told = torch.empty(1 + shape[0] * shape[1], dtype=torch.int64, device=device)
        if self.parallel.world.rank == 0:
            layer, placement = self._plan()
            told.copy_(torch.from_numpy(np.append(layer, placement.ravel())))
        plan = broadcast(told, self.parallel.world).cpu().numpy()
        layer = int(plan[0])
        new: I64 = plan[1:].reshape(shape)
        if layer == _DONE:
            self._looking = False
        elif layer >= 0:
            self._change = _Change(layer, new, deque(plan_moves(self.placements[layer].tolist(), new.tolist())))

    def _plan(self) -> tuple[int, I64]:
        """The next layer that changes, and its placement; at most one is thought about. Rank 0 only."""
        while self._loads:
            layer, load = self._loads.popleft()
            now = self.placements[layer]
            if not load.any() or cosine(load, self._placed_for[layer]) >= self.threshold:
                continue
            self._placed_for[layer] = load.astype(np.float64)
            new = place(load, now)
            if new is now:
                return _AGAIN, now
            before, after = rank_loads(load, now), rank_loads(load, new)
            log.info("experts of layer %d move: the busiest rank's load goes from %.2f to %.2f times the mean",
                     self.layers[layer].layer, before.max() / before.mean(), after.max() / after.mean())
            return layer, new
        return _DONE, self.placements[0]

    def _move(self, change: _Change) -> None:
        one_each = self.parallel.ep.size  # experts after one step: about one for each rank
        some = [change.moves.popleft() for _ in range(min(one_each, len(change.moves)))]
        if some:
            self._mover.move(change.layer, some)
        if not change.moves:
            self._mover.finish(change.layer, change.new.tolist())
            self.placements[change.layer] = change.new
            self.updates += 1
            self._change = None
