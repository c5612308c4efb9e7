"""What a device is: the verbs every platform plugin implements, with their contracts.

A plugin is one folder (cpu/, npu/, cuda/) or a distribution of its own that registers a `Platform` subclass
under the entry-point group `xllm_npu.platforms`. Importing a plugin must work without its device and without
its vendor packages: those are imported inside methods. Callers ask `capabilities`, never the platform's name.
This module knows no model, no KV layout, no scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class PlatformError(RuntimeError):
    """The device or its software cannot do what was asked; the message says what the user can change."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a platform can be used here, and if not, why (one sentence for people)."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes. For cpu, `total` is the machine's (or its cgroup's) memory, `free` what can be had without
    swapping."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class AllocatorStats:
    """Caching allocator statistics in bytes; all zero where the platform has no caching allocator."""

    allocated: int = 0
    reserved: int = 0
    peak_reserved: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers may rely on."""

    graph: str = "none"  # none | compile (torch.compile behind the interface) | capture (replayed streams)
    streams: bool = False
    pinned_memory: bool = False
    virtual_memory: bool = False
    shared_memory: bool = False  # all devices of a machine are one: its memory and cores are divided among ranks
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    default_block_size: int = 128
    default_graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    default_tokens_per_batch: int = 0  # tokens of one step where the user set none; 0: the setting's own default
    default_cache_bytes: int = 0  # KV cache limit where the user set none; 0: what max_memory_utilization leaves
    attention_backends: tuple[str, ...] = ("torch",)  # the first is the default
    kernels: str = "torch"  # which operator set xllm_models.backends binds: torch | cpu | npu | cuda
    notes: tuple[str, ...] = field(default=())


class Stream(ABC):
    """An ordered queue of device work."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all work submitted to the stream has ended."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Work submitted from now on starts only after `event`; does not block the host."""

    @abstractmethod
    def context(self) -> AbstractContextManager[Any]:
        """Work submitted inside goes to this stream."""


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def record(self, stream: Stream | None = None) -> None: ...

    @abstractmethod
    def query(self) -> bool:
        """True once the work before the point has ended; never blocks."""

    @abstractmethod
    def synchronize(self) -> None: ...


class Graph(ABC):
    """One captured computation. It reads and writes the buffers it was captured with."""

    @abstractmethod
    def replay(self) -> torch.Tensor:
        """Run it again on the current contents of its buffers; returns its (static) output."""


class GraphBackend(ABC):
    """How this platform makes a decode step cheap to launch."""

    def prepare_model(self, model: torch.nn.Module) -> None:  # noqa: B027 - optional
        """Called once, after the weights are in place and before the first capture. Default: nothing."""

    @abstractmethod
    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        """Capture `run`, which must be free of host synchronisation. Raises PlatformError if it cannot be."""


class Platform(ABC):
    """One kind of device. Stateless but for the selected device index."""

    name: str  # cpu | npu | cuda | a third party's
    device_type: str  # torch's device type string
    collective_backend: str  # torch.distributed backend: gloo | hccl | nccl

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Can this platform be used here? Must not raise, must not initialise the device for good."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def device_count(self) -> int: ...

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Select the device of this process. Raises PlatformError if there is no such device."""

    @abstractmethod
    def device(self) -> torch.device:
        """The selected device, as torch names it."""

    @abstractmethod
    def device_name(self) -> str:
        """What people call it, e.g. 'Ascend 910B3' or the CPU's model name."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo: ...

    def allocator_stats(self) -> AllocatorStats:
        return AllocatorStats()

    def empty_cache(self) -> None:  # noqa: B027 - optional
        """Return unused cached memory to the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work on the selected device."""

    def new_stream(self) -> Stream:
        raise PlatformError(f"platform {self.name} has no streams; ask capabilities.streams first")

    def new_event(self) -> Event:
        raise PlatformError(f"platform {self.name} has no events; ask capabilities.streams first")

    @abstractmethod
    def manual_seed(self, seed: int) -> None: ...

    def graph_backend(self) -> GraphBackend:
        raise PlatformError(f"platform {self.name} has no graphs; ask capabilities.graph first")

    def configure_process(self, threads: int | None = None, ranks: int = 1) -> None:  # noqa: B027 - optional
        """Set what must be set before heavy libraries start (threads, allocator); a worker calls it first.

        `ranks` processes like this one compute on the machine.
        """

    def inference_context(self) -> AbstractContextManager[Any]:
        """Entered around every forward pass by the thread that runs it."""
        return nullcontext()
