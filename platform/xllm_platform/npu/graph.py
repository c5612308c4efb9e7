"""ACL graphs whose operators may take lengths from the host: each replay updates their tasks.

An operator with host arguments is captured as a task group behind an external event. `replay` launches the graph,
which runs up to the first such event, and then on a stream of its own updates group after group and records its event:
the device computes while the host prepares the operators further down. An event is reset where the graph waits for it.
No update may overtake the replay before it, whose tasks it would change: the update stream waits for its end. Interface
and order of the calls: torch_npu's documentation of graph_task_group_begin and graph_task_update_begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xllm_platform.accelerator import CaptureBackend, CapturedGraph
from xllm_platform.base import Graph, GraphTasks, PlatformError
from xllm_platform.npu.acl import Acl, AclError

if TYPE_CHECKING:
    import torch

Run = Callable[[Sequence["torch.Tensor"]], None]


@dataclass(slots=True, frozen=True)
class Task:
    """One operator of a graph, as its updates need it."""

    run: Run
    tensors: Sequence[torch.Tensor]  # own nothing: the graph's pool may use their memory again further down
    group: Any
    updated: Any  # ExternalEvent


class RecordedTasks(GraphTasks):
    def __init__(self, runtime: Any, alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`alias` makes a tensor over the same memory that does not keep it."""
        self._runtime = runtime
        self._alias = alias
        self._tasks: list[Task] = []  # of the capture that goes on

    def launch(self, run: Run, tensors: Sequence[torch.Tensor]) -> None:
        runtime = self._runtime
        if not runtime.is_current_stream_capturing():
            run(tensors)
            return
        stream = runtime.current_stream()
        updated = runtime.ExternalEvent()
        updated.wait(stream)
        updated.reset(stream)
        runtime.graph_task_group_begin(stream)
        run(tensors)
        group = runtime.graph_task_group_end(stream)
        self._tasks.append(Task(run, [self._alias(tensor) for tensor in tensors], group, updated))

    def take(self) -> list[Task]:
        taken, self._tasks = self._tasks, []
        return taken


class UpdatedGraph(CapturedGraph):
    def __init__(self, raw: Any, output: torch.Tensor, tasks: list[Task], runtime: Any, update: Any) -> None:
        super().__init__(raw, output)
        self._tasks, self._runtime, self._update = tasks, runtime, update
        self._ended = runtime.Event()

    def replay(self) -> torch.Tensor:
        output = super().replay()
        runtime, update = self._runtime, self._update
        update.wait_event(self._ended)  # the replay before this one
        with runtime.stream(update):
            for task in self._tasks:
                runtime.graph_task_update_begin(update, task.group)
                task.run(task.tensors)
                runtime.graph_task_update_end(update)
                task.updated.record(update)
        self._ended.record(runtime.current_stream())
        return output


class NpuCaptureBackend(CaptureBackend):
    def __init__(self, runtime: Any, alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(runtime, runtime.NPUGraph, alias)
        self.tasks = self._recorded = RecordedTasks(runtime, alias)
        self._update: Any = None

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        self._recorded.take()  # what a capture that failed has left
        return super().capture(run)

    def _captured(self, raw: Any, output: torch.Tensor) -> Graph:
        tasks = self._recorded.take()
        if not tasks:
            return CapturedGraph(raw, output)
        if self._update is None:
            self._update = self._runtime.Stream()
        return UpdatedGraph(raw, output, tasks, self._runtime, self._update)

    def streams_left(self) -> int | None:
        try:
            return Acl.load().streams_left()
        except AclError as error:
            raise PlatformError(f"{error}; check `npu-smi info`") from error
