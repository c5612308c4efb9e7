"""Who gives way when blocks or rows run out: preemption by recompute.

The victim's blocks go back when the last step that uses them has ended; then it waits with the tokens it knows, at its
old place in the order.
"""

from __future__ import annotations

from xllm_npu.scheduling.running_set import RunningSet
from xllm_npu.scheduling.step_plan import StepPlan
from xllm_npu.scheduling.waiting_queue import WaitingQueue
from xllm_npu.state.messages import EngineStats
from xllm_npu.state.request import Sequence, SequenceState


class Preemption:
    def __init__(self, running: RunningSet, waiting: WaitingQueue, stats: EngineStats) -> None:
        self._running, self._waiting, self._stats = running, waiting, stats

    def victim(self, plan: StepPlan, offline_only: bool = False) -> Sequence | None:
        """The last prompt in the making, else the last decode in order; never the only one, nor one in this step."""
        table = self._running.table
        if self._running.num_running <= 1:
            return None
        candidates = [s for s in self._running.prefilling() if table.last_step[s.row] != plan.step_id]
        if not candidates:
            rows = self._running.decode_rows()
            rows = rows[table.last_step[rows] != plan.step_id]
            candidates = [s for r in rows[-1:].tolist() if (s := self._running.by_row[r]) is not None]
        candidates = [s for s in candidates if s.order[0] or not offline_only]  # offline ones come last in order
        return candidates[-1] if candidates else None

    def preempt(self, sequence: Sequence) -> int:
        """Take a sequence off; returns the blocks that will come back when its last step has ended (0: now)."""
        running = self._running
        self._stats.preemptions_total += 1
        sequence.preempt_requested = True
        row = sequence.row
        held = int(running.table.num_blocks[row]) if running.in_flight(row) else 0
        running.leave(sequence)
        if not held:
            self.requeue(sequence)
        return held

    def requeue(self, sequence: Sequence) -> None:
        sequence.preempt_requested = False
        if sequence.state is SequenceState.FINISHED:
            return
        self._waiting.push(sequence)

    def relieve(self) -> bool:
        """Nothing can go on and nothing is in flight: the last sequence in order gives way, if it is not alone."""
        sequences = self._running.sequences()
        if len(sequences) <= 1:
            return False
        self.preempt(max(sequences))
        return True
