"""The decode part of a step: one token for every row that still has one to come.

A handful of operations over whole columns; only rows that need a block are looked at one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xllm_npu.scheduling.preemption import Preemption
from xllm_npu.scheduling.running_set import RunningSet
from xllm_npu.scheduling.step_plan import StepPlan
from xllm_npu.state.batch_table import DECODE

I32 = npt.NDArray[np.int32]


class DecodeStage:
    def __init__(self, running: RunningSet, preemption: Preemption) -> None:
        self._running, self._preemption = running, preemption

    def take(self, plan: StepPlan, rows: I32) -> None:
        """One token for each row that still has one to come; rows that get no block wait or give way."""
        table = self._running.table
        start = table.num_computed[rows]
        ready = start < table.max_total[rows] - 1  # else its last token is in flight
        if not ready.all():
            rows = rows[ready]
            start = start[ready]
        if self._running.options.rotary_switch:
            rows, start = self._recompute_outgrown(plan, rows, start)
        limit = min(plan.budget.tokens, plan.budget.seqs)
        if rows.size > limit:
            rows, start = rows[:limit], start[:limit]
        needs = start >= table.num_blocks[rows] * self._running.options.block_size
        if self._running.maybe_shared:
            needs |= self._shared(rows, start)
        if needs.any():
            rows, start = self._grow_decodes(plan, rows, start, needs)
        if not rows.size:
            return
        table.num_computed[rows] = start + 1
        table.last_step[rows] = plan.step_id
        context = int(start.sum()) if plan.budget.model else 0
        plan.budget.add_decodes(rows.size, context)
        plan.add_decodes(rows, start)

    def _recompute_outgrown(self, plan: StepPlan, rows: I32, start: I32) -> tuple[I32, I32]:
        """Rows that reach `rotary_switch` have keys that are wrong from now on: they give way and come back as prompts.

        One that came longer than the switch never decodes at this position.
        """
        outgrown = start == self._running.options.rotary_switch
        for row in rows[outgrown].tolist():
            sequence = self._running.by_row[row]
            assert sequence is not None
            self._preemption.preempt(sequence)
            plan.gave_way = True
        return rows[~outgrown], start[~outgrown]

    def _shared(self, rows: I32, start: I32) -> npt.NDArray[np.bool_]:
        """Which rows would write into a block that a fork shares. Those that own theirs are never asked again."""
        running = self._running
        shared = np.zeros(rows.size, bool)
        for i in np.flatnonzero(np.isin(rows, list(running.maybe_shared))).tolist():
            row, position = int(rows[i]), int(start[i])
            shared[i] = running.blocks.is_shared(row, position)
            if not shared[i] and position < running.table.num_blocks[row] * self._running.options.block_size:
                running.maybe_shared.discard(row)
        return shared

    def _grow_decodes(
        self, plan: StepPlan, rows: I32, start: I32, needs: npt.NDArray[np.bool_]
    ) -> tuple[I32, I32]:
        """One block for every row in `needs`, preempting the last in order while there are not enough."""
        running, blocks, table = self._running, self._running.blocks, self._running.table
        coming = 0
        while (count := int(needs.sum())) > blocks.make_room(count) + coming:
            victim = self._preemption.victim(plan)
            if victim is None:
                break
            coming += self._preemption.preempt(victim)
            keep = table.phase[rows] == DECODE
            rows, start, needs = rows[keep], start[keep], needs[keep]
        granted = np.ones(rows.size, bool)
        for i in np.flatnonzero(needs).tolist():
            row, position = int(rows[i]), int(start[i])
            if not blocks.make_room(1):
                granted[i] = False  # waits for the blocks that a step in flight still holds
            elif blocks.is_shared(row, position):
                plan.copies.append(blocks.make_writable(row, position))
                running.maybe_shared.discard(row)
            elif position >= table.num_blocks[row] * blocks.block_size:
                blocks.grow(row, position + 1)
                running.maybe_shared.discard(row)
        return rows[granted], start[granted]
