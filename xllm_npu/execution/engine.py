"""Dispatches a batch group to workers and collects results, in order.

`execute` is the plain form; `submit` and `collect` are its two halves, for loops that schedule the next step while
one runs. Knows no policy: what runs is the scheduler's choice.
"""

from __future__ import annotations

from xllm_npu.execution.step_message import build_step_input
from xllm_npu.execution.worker_client import WorkerClient
from xllm_npu.state.batch import BatchGroup, StepResult


class Engine:
    """One data-parallel rank's workers; `workers[0]` is the rank that samples."""

    def __init__(self, workers: list[WorkerClient], block_size: int) -> None:
        self._workers = workers
        self._block_size = block_size

    def submit(self, group: BatchGroup) -> None:
        message = build_step_input(group.batches[0], group.tables[0], self._block_size)
        for worker in self._workers:
            worker.send(message)

    def collect(self) -> StepResult:
        """The result of the oldest step submitted."""
        results = [worker.receive() for worker in self._workers]
        return results[0]

    def execute(self, group: BatchGroup) -> StepResult:
        self.submit(group)
        return self.collect()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
