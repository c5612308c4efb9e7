"""One device's side of the engine: a step message in, a step result out.

Holds everything that lives on the device (weights, KV cache, sampling state, buffers) and shares nothing with the
sender but messages, so it runs in the engine's process or in one of its own. Loading is `load_worker` in
worker_loader.py.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from xllm_models.attention.base import PagedBackend
from xllm_platform.base import Platform
from xllm_platform.collectives import broadcast
from xllm_platform.parallel import ParallelState

from xllm_npu.execution.constrained_decoding import ConstrainedDecoding
from xllm_npu.execution.executor import Executor, GraphMisses
from xllm_npu.execution.expert_balancer import ExpertBalancer
from xllm_npu.execution.input_builder import BuiltStep, InputBuilder
from xllm_npu.execution.logprobs import prompt_logprobs
from xllm_npu.execution.lora_worker import LoraWorker
from xllm_npu.execution.pooled_rows import PooledRows
from xllm_npu.execution.sampler import Sampler, SampleResult
from xllm_npu.execution.sampling_state import SamplingState
from xllm_npu.execution.step_message import StepInput
from xllm_npu.execution.step_profile import StepProfile
from xllm_npu.execution.weight_update import WeightUpdater
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.batch import StepResult
from xllm_npu.state.messages import Logprobs

PROMPT_LOGPROB_ROWS = 128  # prompt positions whose logits exist at once


@dataclass(slots=True)
class WorkerParts:
    """What a worker is made of; see worker_loader.py."""

    platform: Platform
    model: torch.nn.Module
    attention: PagedBackend
    builder: InputBuilder
    executor: Executor
    sampling: SamplingState
    parallel: ParallelState = field(default_factory=ParallelState.single)
    balancer: ExpertBalancer | None = None
    constrained: ConstrainedDecoding | None = None  # where this rank samples, and grammars can be had
    pooled: PooledRows | None = None  # prompts become vectors, and nothing is sampled
    lora: LoraWorker | None = None  # where adapters can be had
    updater: WeightUpdater | None = None  # of the weights, from other checkpoints
    memory: WorkerMemoryResources | None = None  # under weights and KV cache, where those are in virtual memory


class Worker:
    def __init__(self, parts: WorkerParts) -> None:
        self.parts = parts
        self._sampler = Sampler(parts.sampling)
        self._profile = StepProfile(parts.platform, f"rank-{parts.parallel.world.rank}")
        self._samples = parts.parallel.tp.rank == 0  # the other ranks hear of the tokens

    def execute(self, step: StepInput) -> StepResult:
        """Run one step and wait for its tokens."""
        began = time.monotonic()
        p = self.parts
        misses = dataclasses.replace(p.executor.misses)
        with self._stepping(), torch.inference_mode(), p.platform.inference_context():
            self._update_rows(step)
            if p.constrained is not None:
                p.constrained.begin(step.array("sample_rows"))
            plan = p.executor.plan(step, p.builder.has_lora(step.array("rows")))
            built = p.builder.build(step, plan.graph_size, plan.padded_tokens, plan.lora)
            hidden = p.executor.run(built.input, plan)
            if p.pooled is not None:
                return self._pool(step, built, hidden, began)
            result = self._sample(built, hidden)
            prompts = self._prompt_logprobs(step, built, hidden) if step.prompt_logprobs else {}
            if p.balancer is not None:
                p.balancer.after_step()
        return self._result(step, result, prompts, began, misses)

    def _pool(self, step: StepInput, built: BuiltStep, hidden: torch.Tensor, began: float) -> StepResult:
        pooled = self.parts.pooled
        assert pooled is not None
        vectors = pooled.pool(step, built, hidden)
        result = StepResult(step_id=step.step_id)
        if vectors is not None:
            found = pooled.pooler(vectors, self.parts.model).float().cpu().numpy()  # [S, width]
            result.vectors = found.tobytes()
            result.failed = np.flatnonzero(~np.isfinite(found).all(axis=1)).tolist()
        result.seconds = time.monotonic() - began
        return result

    def _stepping(self) -> AbstractContextManager[object]:
        """Held during a step, so that no sleep takes the weights away."""
        memory = self.parts.memory
        return nullcontext() if memory is None or memory.residency is None else memory.residency.stepping

    def profile(self, directory: str) -> None:
        """Trace the steps that follow into files in `directory`, or with "" end that. Raises ProfileError."""
        self._profile.switch(directory)

    def load_lora(self, lora_id: int, path: str) -> None:
        """Read an adapter, together with the other ranks of the engine. Raises LoraError on all or none."""
        assert self.parts.lora is not None
        with torch.inference_mode(), self.parts.platform.inference_context():
            self.parts.lora.load(lora_id, path)

    def unload_lora(self, lora_id: int) -> None:
        assert self.parts.lora is not None
        self.parts.lora.unload(lora_id)

    def load_weights(self, checkpoint: str) -> None:
        """As `WeightUpdater.load`."""
        assert self.parts.updater is not None
        with self._stepping(), self.parts.platform.inference_context():
            self.parts.updater.load(checkpoint)

    def close(self) -> None:
        """Leave the other ranks and give virtual memory back; no step follows."""
        self.parts.parallel.shutdown()
        if self.parts.constrained is not None:
            self.parts.constrained.close()
        if self.parts.memory is not None:
            self.parts.memory.close()

    def _update_rows(self, step: StepInput) -> None:
        sampling = self.parts.sampling
        if self._samples:
            constrained = self.parts.constrained
            for row in step.released:
                sampling.release(row)
                if constrained is not None:
                    constrained.release(row)
            for a in step.admitted:
                output = np.frombuffer(a.output, np.int32)
                sampling.admit(a.row, a.params, a.stop_ids, np.frombuffer(a.prompt, np.int32), output,
                               a.sequence_index)
                if constrained is not None and a.params.grammar is not None:
                    constrained.admit(a.row, a.params.grammar, output)
        for a in step.admitted:
            self.parts.builder.admit(a.row, a.second_rotation, a.lora_slot)
        for slot, lora_id in step.lora_loads:
            assert self.parts.lora is not None
            self.parts.lora.put(slot, lora_id)
        if step.copies:
            pairs = torch.tensor(step.copies, dtype=torch.int64, device=self.parts.builder.device)
            self.parts.attention.copy_blocks(pairs)

    def _sample(self, built: BuiltStep, hidden: torch.Tensor) -> SampleResult | None:
        count = built.sample_rows.size
        if not count:
            return None
        if built.all_sampled_in_order:
            wanted = hidden[:count]
        else:
            index = torch.from_numpy(built.sample_positions.astype(np.int64))
            wanted = hidden[index.to(hidden.device, non_blocking=True)]
        logits = self.parts.model.compute_logits(wanted)  # type: ignore[operator]
        result = None
        if self._samples:
            constrained = self.parts.constrained
            mask = None if constrained is None else constrained.mask()
            result = self._sampler.sample(logits, built.sample_rows, built.sample_output, mask)
            self.parts.sampling.observe(built.sample_rows, result.tokens)
        tokens = logits.new_empty(count, dtype=torch.int64) if result is None else result.tokens
        self.parts.builder.remember(built.sample_rows, broadcast(tokens, self.parts.parallel.tp))
        return result

    def _prompt_logprobs(
        self, step: StepInput, built: BuiltStep, hidden: torch.Tensor
    ) -> dict[int, list[Logprobs]]:
        """For each asking row: one entry a computed position, about the token that follows it."""
        tokens, found = step.array("tokens"), {}
        for index, k, following in step.prompt_logprobs:
            begin, end = int(built.query_start[index]), int(built.query_start[index + 1])
            targets = np.append(tokens[begin + 1 : end], np.int32(max(following, 0)))
            entries: list[Logprobs] = []
            for first in range(begin, end, PROMPT_LOGPROB_ROWS):
                last = min(first + PROMPT_LOGPROB_ROWS, end)
                logits = self.parts.model.compute_logits(hidden[first:last])  # type: ignore[operator]
                if not self._samples:
                    continue
                measured = prompt_logprobs(logits, targets[first - begin : last - begin], k)
                entries += [measured.entry(i) for i in range(last - first)]
            found[int(built.rows[index])] = entries if following >= 0 else entries[:-1]
        return found

    def _result(
        self, step: StepInput, sample: SampleResult | None, prompts: dict[int, list[Logprobs]], began: float,
        misses: GraphMisses,
    ) -> StepResult:
        """`misses`: before the step."""
        now = self.parts.executor.misses
        result = StepResult(step_id=step.step_id, prompt_logprobs=prompts, graph_miss=now.decode > misses.decode,
                            prefill_graph_miss=now.prefill > misses.prefill)
        if sample is not None:
            host = sample.to_host()
            result.tokens = host.tokens.tobytes()
            if host.bad_rows.any():
                result.failed = np.flatnonzero(host.bad_rows).tolist()
            if self.parts.constrained is not None:
                result.failures = self.parts.constrained.accept(host.tokens)
                result.failed = sorted({*result.failed, *result.failures})
            if host.logprobs is not None:
                by_row = host.logprobs.by_row()
                order = step.array("sample_rows").tolist()
                result.logprobs = {i: by_row[row] for i, row in enumerate(order) if row in by_row}
        result.seconds = time.monotonic() - began
        return result
