"""The engine's end of a worker: messages in order, results in order.

`InProcessWorker` runs the worker on a thread of this process, so that the next step can be scheduled while one runs
(device work and numba kernels release the interpreter lock). A worker process gets the same three verbs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from xllm_npu.execution.step_message import StepInput
from xllm_npu.state.batch import StepResult


class StepExecutor(Protocol):
    def execute(self, step: StepInput) -> StepResult: ...

    def profile(self, directory: str) -> None: ...

    def load_lora(self, lora_id: int, path: str) -> None: ...

    def unload_lora(self, lora_id: int) -> None: ...

    def load_weights(self, checkpoint: str) -> None: ...

    def close(self) -> None: ...


class WorkerClient(Protocol):
    """One rank, or all of an engine's ranks as one."""

    def send(self, step: StepInput) -> None: ...

    def receive(self) -> StepResult:
        """The result of the oldest step sent; raises what the worker raised."""
        ...

    def profile(self, directory: str) -> None:
        """After the steps sent: trace those that follow into `directory`, or with "" write what was traced."""
        ...

    def load_lora(self, lora_id: int, path: str) -> None:
        """After the steps sent: read an adapter. Raises LoraError where a rank cannot; then none has it."""
        ...

    def unload_lora(self, lora_id: int) -> None:
        """After the steps sent."""
        ...

    def load_weights(self, checkpoint: str) -> None:
        """After the steps sent: over those that are there. Raises whatever goes wrong, with the weights in between."""
        ...

    def close(self) -> None: ...


class _Call:
    """What goes the way of the steps: a profiler belongs to the thread it watches, and ranks read adapters together."""

    def __init__(self, call: Callable[[StepExecutor], None]) -> None:
        self._call = call
        self.done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, worker: StepExecutor) -> None:
        try:
            self._call(worker)
        except Exception as error:  # handed to the engine thread, which decides
            self.done.put(error)
        else:
            self.done.put(None)


class InProcessWorker:
    """A thread that makes a worker and then executes steps in the order they were sent.

    The worker is made on the thread that will run it: OpenMP keeps a team of threads for every thread that has ever
    computed, and on the CPU two teams cost a third of the speed of one.
    """

    def __init__(self, make: Callable[[], StepExecutor]) -> None:
        self._steps: queue.SimpleQueue[StepInput | _Call | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._called: _Call | None = None  # that is waited for
        self.busy_since: float | None = None  # monotonic; when the step that runs now began
        self._thread = threading.Thread(target=self._run, args=(make,), name="worker", daemon=True)
        self._thread.start()

    def wait_made(self) -> None:
        """Return when the worker is made; raise what `make` raised, or what `fail` was given."""
        failure = self._made.get()
        if failure is not None:
            raise failure

    def _run(self, make: Callable[[], StepExecutor]) -> None:
        try:
            worker = make()
        except BaseException as error:  # raised again where the worker was asked for
            self._made.put(error)
            return
        self._made.put(None)
        while (step := self._steps.get()) is not None:
            if isinstance(step, _Call):
                step.run(worker)
                continue
            self.busy_since = time.monotonic()
            try:
                self._results.put(worker.execute(step))
            except BaseException as error:  # handed to the engine thread, which decides
                self._results.put(error)
            self.busy_since = None
        worker.close()

    def fail(self, error: BaseException) -> None:
        """Wake whoever waits for this worker with `error`; its thread may be stuck for good. From any thread."""
        self._failure = error
        self._made.put(error)
        self._results.put(error)
        if self._called is not None:
            self._called.done.put(error)

    def send(self, step: StepInput) -> None:
        self._steps.put(step)

    def receive(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def profile(self, directory: str) -> None:
        self._do(lambda worker: worker.profile(directory))

    def load_lora(self, lora_id: int, path: str) -> None:
        self._do(lambda worker: worker.load_lora(lora_id, path))

    def unload_lora(self, lora_id: int) -> None:
        self._do(lambda worker: worker.unload_lora(lora_id))

    def load_weights(self, checkpoint: str) -> None:
        self._do(lambda worker: worker.load_weights(checkpoint))

    def _do(self, call: Callable[[StepExecutor], None]) -> None:
        self._called = _Call(call)
        self._steps.put(self._called)
        if self._failure is not None:
            raise self._failure
        failure = self._called.done.get()
        self._called = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        self._steps.put(None)
        if self._failure is None:
            self._thread.join()


class DirectWorker:
    """No thread: a step runs when its result is asked for. For plain loops, where nothing overlaps."""

    def __init__(self, worker: StepExecutor) -> None:
        self._worker = worker
        self._steps: list[StepInput] = []

    def send(self, step: StepInput) -> None:
        self._steps.append(step)

    def receive(self) -> StepResult:
        return self._worker.execute(self._steps.pop(0))

    def profile(self, directory: str) -> None:
        self._worker.profile(directory)

    def load_lora(self, lora_id: int, path: str) -> None:
        self._worker.load_lora(lora_id, path)

    def unload_lora(self, lora_id: int) -> None:
        self._worker.unload_lora(lora_id)

    def load_weights(self, checkpoint: str) -> None:
        self._worker.load_weights(checkpoint)

    def close(self) -> None:
        self._steps.clear()
        self._worker.close()
