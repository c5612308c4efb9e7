"""Drives a Scheduler over a ScriptedWorker, plain or overlapped, and collects what clients would hear."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from tests.support.scripted_worker import ScriptedWorker
from xllm_npu.execution.step_message import StepInput, build_step_input
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.kv_cache.block_pool import BlockPool
from xllm_npu.state.messages import AddRequest, Finished, StepOutputs, sequence_key
from xllm_npu.state.sampling_params import SamplingParams


def add_request(request_id: int, prompt, **params) -> AddRequest:
    names = ("priority", "offline", "cache_salt", "ttft_slo_ms", "tpot_slo_ms", "lora_id")
    extra = {k: params.pop(k) for k in names if k in params}
    return AddRequest(request_id=request_id, external_id=f"r{request_id}", prompt=np.array(prompt, np.int32).tobytes(),
                      params=SamplingParams(**params), arrival_time=0.0, **extra)


class Driver:
    def __init__(
        self, overlap: bool = False, vocab: int = 1000, pool: BlockPool | None = None,
        is_mapped: Callable[[int], bool] = lambda block: True, **options
    ) -> None:
        defaults = {"max_seqs": 8, "max_tokens": 64, "max_model_len": 128, "num_blocks": 40, "block_size": 4}
        self.options = SchedulerOptions(**{**defaults, **options})
        self.scheduler = Scheduler(self.options, pool)
        num_blocks = self.options.num_blocks if pool is None else pool.num_blocks
        self.worker = ScriptedWorker(num_blocks, self.options.block_size, self.options.max_seqs, vocab, is_mapped)
        self.depth = 1 if overlap else 0
        self.queue: deque[StepInput] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.aborted: set[int] = set()
        self.largest_step = 0

    def abort(self, keys: list[int]) -> None:
        self.scheduler.abort(keys)
        self.aborted.update(keys)

    def step(self) -> bool:
        """One turn of the loop: schedule, and process when the pipeline is full. False when nothing is left."""
        group = self.scheduler.schedule()
        if group is not None:
            batch = group.batches[0]
            self.largest_step = max(self.largest_step, batch.num_tokens)
            self.queue.append(build_step_input(batch, group.tables[0], self.options.block_size))
        if self.queue and (len(self.queue) > self.depth or group is None):
            self.hear(self.scheduler.process(self.worker.execute(self.queue.popleft())))
        elif group is None:
            pending = self.scheduler.pending_outputs()
            if pending is not None:
                self.hear(pending)
            assert not self.scheduler.requests, "requests are left, and nothing can be scheduled"
        return bool(self.scheduler.has_work)

    def hear(self, outputs: StepOutputs) -> None:
        for key, token in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
            assert key not in self.finished, "a token after the end"
            assert key not in self.aborted, "a token after the abort"
            self.tokens.setdefault(key, []).append(token)
        for end in outputs.finished:
            assert end.key not in self.finished, "ended twice"
            self.finished[end.key] = end

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            self.scheduler.check_integrity()
            if not self.step():
                break
        else:
            raise AssertionError(f"not done after {limit} steps")
        self.scheduler.check_integrity()

    def output(self, request_id: int, index: int = 0) -> list[int]:
        return self.tokens.get(sequence_key(request_id, index), [])
