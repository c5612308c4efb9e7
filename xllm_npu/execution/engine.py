"""Dispatches a batch group to workers and collects results, in order.

`execute` is the plain form; `submit` and `collect` are its two halves, for loops that schedule the next step while
one runs. Knows no policy: what runs is the scheduler's choice.
"""

from __future__ import annotations

from xllm_npu.execution.engine_memory import EngineMemory
from xllm_npu.execution.step_message import StepInput, build_step_input
from xllm_npu.execution.worker_client import WorkerClient
from xllm_npu.execution.worker_group import WorkerGroup
from xllm_npu.state.batch import BatchGroup, StepResult


class Engine:
    """One data-parallel rank's workers: the first samples and answers, the others compute along."""

    def __init__(
        self, worker: WorkerClient, others: WorkerGroup | None, block_size: int,
        pages: EngineMemory | None = None,
    ) -> None:
        self._worker, self._others = worker, others
        self._block_size = block_size
        self.pages = pages  # behind an elastic KV cache

    def submit(self, group: BatchGroup) -> None:
        message = build_step_input(group.batches[0], group.tables[0], self._block_size)
        message.dp_tokens, message.dp_all_decode = group.dp_tokens, group.dp_all_decode
        self.send(message)

    def send(self, step: StepInput) -> None:
        if self._others is not None:
            self._others.send(step)
        self._worker.send(step)

    def collect(self) -> StepResult:
        """The result of the oldest step submitted. Raises what a worker raised, or how one died."""
        try:
            return self._worker.receive()
        except Exception as error:
            if self._others is not None:
                raise self._others.cause(error) from error
            raise

    def execute(self, group: BatchGroup) -> StepResult:
        self.submit(group)
        return self.collect()

    def check(self) -> None:
        """Raise how a worker died, if one has: an idle engine hears of it nowhere else."""
        if self._others is not None and self._others.failure is not None:
            raise self._others.failure

    def close(self) -> None:
        if self.pages is not None:
            self.pages.close()
        if self._others is not None:
            self._others.close()
        self._worker.close()
