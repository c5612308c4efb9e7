"""What the npu and cuda plugins share: a device behind a torch runtime module shaped like torch's own device
modules.

torch_npu registers `torch.npu` with the same verbs as torch's CUDA module (streams, events, memory
statistics, graph capture), so the code is written once against that shape and a plugin supplies the module.
This file names neither.
"""

from __future__ import annotations

import gc
import os
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from xllm_platform.base import (
    AllocatorStats,
    Cut,
    Event,
    Graph,
    GraphBackend,
    MemoryInfo,
    Platform,
    PlatformError,
    Stream,
)
from xllm_platform.graph_pieces import Alias, PieceCapture

if TYPE_CHECKING:
    import torch


class DeviceStream(Stream):
    """A stream of a torch device module; `raw` is torch's object, for operators that want it."""

    def __init__(self, runtime: Any, raw: Any) -> None:
        self._runtime = runtime
        self.raw = raw

    def synchronize(self) -> None:
        self.raw.synchronize()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, DeviceEvent), "events and streams are of one platform"
        self.raw.wait_event(event.raw)

    def context(self) -> AbstractContextManager[Any]:
        return self._runtime.stream(self.raw)


class DeviceEvent(Event):
    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.raw = runtime.Event()

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            self.raw.record(self._runtime.current_stream())
            return
        assert isinstance(stream, DeviceStream), "events and streams are of one platform"
        self.raw.record(stream.raw)

    def query(self) -> bool:
        return bool(self.raw.query())

    def synchronize(self) -> None:
        self.raw.synchronize()


class CapturedGraph(Graph):
    """A captured stream with its static output. Replay is asynchronous: it is ordered on the current
    stream."""

    def __init__(self, raw: Any, output: torch.Tensor) -> None:
        self.raw = raw
        self._output = output

    def replay(self) -> torch.Tensor:
        self.raw.replay()
        return self._output


class CaptureBackend(GraphBackend):
    """Stream capture into graphs that share one memory pool, so that N sizes cost the largest one's memory.

    Captures share intermediates: an output is valid until the next replay of any graph of this backend.
    """

    WARM_UP_RUNS = (
        2  # lazy initialisation (workspaces, autotuning, compilation) must happen outside a capture
    )

    def __init__(self, runtime: Any, new_graph: Callable[[], Any], alias: Alias) -> None:
        self._runtime = runtime
        self._new_graph = new_graph
        self._alias = alias
        self._pool: Any = None
        self._stream: Any = None  # captures cannot be made on the default stream

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        self._warm_up(run)
        raw = self._new_graph()
        try:
            with self._runtime.graph(raw, pool=self._pool, stream=self._stream):
                output = run()
        except RuntimeError as error:
            raise PlatformError(
                f"The decode step cannot be captured as a graph: {error}. Turn enable_graph off, or if the "
                "device ran out of memory or streams, capture fewer or smaller batch sizes."
            ) from error
        return self._captured(raw, output)

    def capture_pieces(self, run: Callable[[Cut], torch.Tensor]) -> Graph:
        runtime = self._runtime
        self._warm_up(lambda: run(lambda call, tensors: None))
        gc.collect()  # nothing is to be released within a capture
        runtime.empty_cache()
        with runtime.stream(self._stream):
            try:
                return PieceCapture(self._new_graph, self._pool, self._alias).capture(run)
            except RuntimeError as error:
                raise PlatformError(
                    f"A prompt's step cannot be captured in pieces: {error}. Turn enable_prefill_piecewise_graph "
                    "off, or if the device ran out of memory or streams, lower max_tokens_for_graph_mode."
                ) from error

    def _captured(self, raw: Any, output: torch.Tensor) -> Graph:
        return CapturedGraph(raw, output)

    def _warm_up(self, run: Callable[[], torch.Tensor]) -> None:
        if self._stream is None:
            self._pool = self._runtime.graph_pool_handle()
            self._stream = self._runtime.Stream()
        current = self._runtime.current_stream()
        self._stream.wait_stream(current)
        with self._runtime.stream(self._stream):
            for _ in range(self.WARM_UP_RUNS):
                run()
        current.wait_stream(self._stream)
        self._runtime.synchronize()


class AcceleratorPlatform(Platform):
    """A platform whose device is reached through `_runtime()`, a module with torch's device verbs."""

    visible_devices_variable: str  # environment variable that hides devices from a process

    def __init__(self) -> None:
        self._index = 0

    @staticmethod
    @abstractmethod
    def _runtime() -> Any:
        """The torch device module, imported now. Raises PlatformError if it cannot be."""

    def device_count(self) -> int:
        return int(self._runtime().device_count())

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            hidden = os.environ.get(self.visible_devices_variable)
            note = f" ({self.visible_devices_variable}={hidden})" if hidden is not None else ""
            raise PlatformError(f"There is no {self.name} device {index}: this process sees {count}{note}.")
        self._runtime().set_device(index)
        self._index = index

    def device(self) -> torch.device:
        import torch

        return torch.device(self.device_type, self._index)

    def device_name(self) -> str:
        return str(self._runtime().get_device_name(self._index))

    def memory_info(self) -> MemoryInfo:
        free, total = self._runtime().mem_get_info(self._index)
        return MemoryInfo(free=int(free), total=int(total))

    def allocator_stats(self) -> AllocatorStats:
        runtime = self._runtime()
        return AllocatorStats(
            allocated=int(runtime.memory_allocated(self._index)),
            reserved=int(runtime.memory_reserved(self._index)),
            peak_allocated=int(runtime.max_memory_allocated(self._index)),
            peak_reserved=int(runtime.max_memory_reserved(self._index)),
        )

    def reset_peak_stats(self) -> None:
        self._runtime().reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        self._runtime().empty_cache()

    def empty_host_cache(self) -> None:
        import torch

        torch.accelerator.empty_host_cache()

    def synchronize(self) -> None:
        self._runtime().synchronize(self._index)

    def new_stream(self) -> Stream:
        runtime = self._runtime()
        return DeviceStream(runtime, runtime.Stream(device=self.device()))

    def new_event(self) -> Event:
        return DeviceEvent(self._runtime())

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)
        self._runtime().manual_seed_all(seed)
