"""Dispatches a batch group to workers and collects results, in order.

`execute` is the plain form; `submit` and `collect` are its two halves, for loops that schedule the next step while
one runs. Knows no policy: what runs is the scheduler's choice.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

from xllm_models.weights.lora_adapter import LoraError

from xllm_npu.execution.engine_memory import EngineMemory
from xllm_npu.execution.engine_weights import EngineWeights
from xllm_npu.execution.grammar_cache import GrammarCache
from xllm_npu.execution.step_message import StepInput, build_step_input
from xllm_npu.execution.worker_client import WorkerClient
from xllm_npu.execution.worker_group import WorkerGroup
from xllm_npu.state.batch import BatchGroup, StepResult
from xllm_npu.state.messages import TAGS


class SleepUnavailable(RuntimeError):
    """This engine cannot sleep as it was started; the message names the setting."""


class Engine:
    """One data-parallel rank's workers: the first samples and answers, the others compute along."""

    def __init__(
        self, worker: WorkerClient, others: WorkerGroup | None, block_size: int,
        memory: EngineMemory | None = None, grammars: GrammarCache | None = None,
        weights: EngineWeights | None = None,
    ) -> None:
        self.grammars = grammars
        self._worker, self._others = worker, others
        self._block_size = block_size
        self.memory = memory  # where some of it is virtual and comes and goes
        self._weights = weights

    @property
    def pages(self) -> EngineMemory | None:
        """Behind an elastic KV cache."""
        return self.memory if self.memory is not None and self.memory.elastic_kv else None

    def submit(self, group: BatchGroup) -> None:
        message = build_step_input(group.batches[0], group.tables[0], self._block_size)
        message.dp_tokens, message.dp_all_decode = group.dp_tokens, group.dp_all_decode
        self.send(message)

    def send(self, step: StepInput) -> None:
        if self.memory is not None and not self.memory.is_awake:  # it would touch what is not mapped
            raise RuntimeError("The engine sleeps and cannot run a step.")
        if self._others is not None:
            self._others.send(step.without_grammars())
        self._worker.send(step)

    def collect(self) -> StepResult:
        """The result of the oldest step submitted. Raises what a worker raised, or how one died."""
        try:
            return self._worker.receive()
        except Exception as error:
            cause = error if self._others is None else self._others.cause(error)
            if cause is error:
                raise
            raise cause from error

    def execute(self, group: BatchGroup) -> StepResult:
        self.submit(group)
        return self.collect()

    def sleep(self, level: int) -> int:
        """Give back the memory of weights and KV cache; bytes of all ranks. Asleep already, level 2 drops what level 1
        kept.

        Nothing is in flight, no request has a block, and block pools take and give no page until `wake` of the KV
        cache. A KV cache that is not in virtual memory stays. Level 1 keeps the weights in host memory, where the
        device has another; elsewhere they are read from the checkpoint again and must be the same. Level 2 reads them
        again everywhere. Raises SleepUnavailable, SleepFailed (then all is as before), or MemoryOwnershipLost, which
        is fatal.
        """
        assert level in (1, 2)
        return self._sleeper().sleep(level)

    def wake(self, tags: Collection[str] = TAGS) -> None:
        """Take memory back for those of `tags` that sleep, on all ranks or none, and fill the weights.

        Raises SleepUnavailable, PageGrowthRefused (then all is as before), or MemoryOwnershipLost, which is fatal.
        """
        self._sleeper().wake(tags)

    def weights_hash(self) -> str:
        """Of all ranks' weights, bit for bit. Raises SleepUnavailable, or RuntimeError while they sleep."""
        return self._sleeper().weights_hash()

    def _sleeper(self) -> EngineMemory:
        if self.memory is None or not self.memory.has_weights:
            raise SleepUnavailable("Only a model whose weights are in virtual memory can sleep: start it with "
                                   "--enable-vmm-weights.")
        return self.memory

    def profile(self, directory: str) -> None:
        """Trace the steps from now on into files in `directory`, on every rank; "" ends that and writes them.

        Waits for the steps in flight, and for the files of rank 0. Raises ProfileError, of rank 0 too.
        """
        if self._others is not None:
            self._others.profile(directory)
        self._worker.profile(directory)

    def load_lora(self, lora_id: int, path: str) -> None:
        """Read an adapter on every rank. Waits for the steps in flight. Raises LoraError; then no rank has it."""
        if self._others is not None:
            self._others.load_lora(lora_id, path)
        try:
            self._worker.load_lora(lora_id, path)
        except LoraError:
            raise
        except Exception as error:
            cause = error if self._others is None else self._others.cause(error)
            raise cause from error

    def unload_lora(self, lora_id: int) -> None:
        """No step that is sent from now on uses the adapter."""
        if self._others is not None:
            self._others.unload_lora(lora_id)
        self._worker.unload_lora(lora_id)

    def check_weights(self, checkpoint: str) -> Future[None]:
        """As `EngineWeights.check`."""
        assert self._weights is not None
        return self._weights.check(checkpoint)

    def load_weights(self, checkpoint: str) -> None:
        """As `EngineWeights.load`; nothing is in flight."""
        assert self._weights is not None
        self._weights.load(checkpoint)

    def check(self) -> None:
        """Raise how a worker died, if one has: an idle engine hears of it nowhere else."""
        if self._others is not None and self._others.failure is not None:
            raise self._others.failure

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
        if self._others is not None:
            self._others.close()
        self._worker.close()
