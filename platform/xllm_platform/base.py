"""What a device is: the verbs every platform plugin implements, with their contracts.

A plugin is one folder (cpu/, npu/, cuda/) or a distribution of its own that registers a `Platform` subclass
under the entry-point group `xllm_npu.platforms`. Importing a plugin must work without its device and without
its vendor packages: those are imported inside methods. Callers ask `capabilities`, never the platform's name.
This module knows no model, no KV layout, no scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from xllm_platform.parallel import Group


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
    peak_allocated: int = 0  # peaks since the process began or the last reset_peak_stats
    peak_reserved: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers may rely on."""

    graph: str = "none"  # none | compile (torch.compile behind the interface) | capture (replayed streams)
    streams: bool = False
    pinned_memory: bool = False
    virtual_memory: bool = False
    shared_pages: Literal["none", "descriptor", "number"] = "none"  # how pages get to another process
    shared_memory: bool = False  # all devices of a machine are one: its memory and cores are divided among ranks
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    slow_dtypes: tuple[str, ...] = ()  # of these; a model whose dtype nobody chose is computed in float32 instead
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
        """Run it again on the current contents of its buffers; returns its (static) output.

        The operators launched through `GraphTasks` are given their host arguments as they are now.
        """


# Given a call and the tensors it takes: a row of graphs is cut here, see GraphBackend.capture_pieces.
Cut = Callable[[Callable[[Sequence["torch.Tensor"]], None], Sequence["torch.Tensor"]], None]


class GraphTasks(ABC):
    """Operators in graphs that take arguments from the host (lengths), anew for each replay."""

    @abstractmethod
    def launch(
        self, run: Callable[[Sequence[torch.Tensor]], None], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Call `run(tensors)`, which launches one operator that writes to some of `tensors`.

        In a capture it is also remembered: each replay calls it again, with tensors over the same memory, so
        what it reads on the host must be the step's own by then. What else it refers to stays alive with the
        graph, and must not be memory of the graph. It launches the same operator each time.
        """


class GraphBackend(ABC):
    """How this platform makes a decode step cheap to launch."""

    tasks: GraphTasks | None = None  # None: a graph of this platform takes nothing from the host

    def streams_left(self) -> int | None:
        """How many more streams the device has, of which every graph takes some; None: no limit is known."""
        return None

    def prepare_model(self, model: torch.nn.Module) -> None:  # noqa: B027 - optional
        """Called once, after the weights are in place and before the first capture. Default: nothing."""

    @abstractmethod
    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        """Capture `run`, which must be free of host synchronisation. Raises PlatformError if it cannot be."""

    def capture_pieces(self, run: Callable[[Cut], torch.Tensor]) -> Graph:
        """Capture `run(cut)` as a row of graphs, between which replays run what is not captured.

        `cut(call, tensors)` ends one graph and begins the next. Each replay runs `call(tensors)` there, with
        tensors over the same memory, which it may write to; while `run` is captured it is not called. What else
        it refers to stays alive with the graph, and must not be memory of the graph. Raises PlatformError if
        `run` cannot be captured. Platforms whose capabilities.graph is "capture" have it.
        """
        raise PlatformError("This platform's graphs are not captured in pieces.")


class VirtualMemoryDriver(ABC):
    """Ranges of addresses, and physical pages of the selected device that are mapped into them.

    A range is reserved once and takes no memory. A page is mapped whole, at an address that is a multiple of
    the granularity; it may be mapped at several addresses, which then show the same bytes, and an address may
    be mapped again after `unmap`. Work on the device that uses a mapping must have ended before it goes. All
    sizes are bytes. Every failure is a PlatformError that names the call, its code and what that means.
    """

    new_pages_are_zero: bool = False  # else a page shows whatever its memory held before

    @property
    @abstractmethod
    def granularity(self) -> int:
        """What page sizes and addresses are multiples of."""

    @abstractmethod
    def reserve(self, size: int) -> int:
        """The address of a free range of `size`, a multiple of the granularity."""

    @abstractmethod
    def free_range(self, address: int) -> None:
        """Give back a range that `reserve` returned, in which nothing is mapped."""

    @abstractmethod
    def create_page(self, size: int) -> int:
        """Take `size` of the device's memory, a multiple of the granularity; returns the page's handle.

        Raises OutOfMemoryError if the device has no more.
        """

    @abstractmethod
    def release_page(self, page: int) -> None:
        """Give a page's memory back; it must be mapped nowhere."""

    @abstractmethod
    def map(self, address: int, page: int) -> None:
        """Show the page at `address`, inside one reserved range; readable and writable by the device."""

    @abstractmethod
    def unmap(self, address: int) -> None:
        """End the mapping that begins at `address`."""

    @property
    def importer(self) -> int:
        """What this process is to one that exports pages to it."""
        return 0

    def export_page(self, page: int, importer: int) -> int:
        """Let the process that is `importer` have a page that this one created, for reading.

        As capabilities.shared_pages says: a file descriptor, for the caller to hand over and close, or a number. A page
        may be exported to several processes, one after the other: to the next when the last has imported it. From now
        on its memory goes when all that have it have released it, or ended.
        """
        raise PlatformError("Pages of this platform are not shared; ask capabilities.shared_pages first.")

    def import_page(self, exported: int, size: int) -> int:
        """The handle of a page of `size` that another process has exported to this one, and which it must only read.

        A descriptor can be closed then. It is mapped and released like any other; it cannot be exported.
        """
        raise PlatformError("Pages of this platform are not shared; ask capabilities.shared_pages first.")

    @abstractmethod
    def view(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over memory from `address` on, which owns nothing.

        Only what is mapped when work runs may be touched.
        """


class OutOfMemoryError(PlatformError):
    """The device has no memory left for what was asked."""


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

    def reset_peak_stats(self) -> None:  # noqa: B027 - optional
        """The peaks of `allocator_stats` start from what is in use now."""

    def empty_cache(self) -> None:  # noqa: B027 - optional
        """Return unused cached memory to the device."""

    def empty_host_cache(self) -> None:  # noqa: B027 - optional
        """Return unused cached pinned memory to the host."""

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

    def virtual_memory(self) -> VirtualMemoryDriver:
        raise PlatformError(f"platform {self.name} has no virtual memory; ask capabilities.virtual_memory first")

    def communicator_name(self, group: Group) -> str:
        """What fused operators that communicate are told to find a group's communicator by.

        The first call makes the communicator, so all ranks of the group call it together.
        """
        raise PlatformError(f"operators of platform {self.name} do not communicate")

    def configure_process(self, threads: int | None = None, ranks: int = 1) -> None:  # noqa: B027 - optional
        """Set what must be set before heavy libraries start (threads, allocator); a worker calls it first.

        `ranks` processes like this one compute on the machine.
        """

    def profiler(self, directory: str, name: str) -> Any:
        """An object with `start` and `stop`, both for the thread that traces itself.

        `stop` writes a trace of what ran between as a file in `directory` whose name begins with `name`.
        """
        import torch

        written = torch.profiler.tensorboard_trace_handler(directory, worker_name=name, use_gzip=True)
        return torch.profiler.profile(on_trace_ready=written)

    def inference_context(self) -> AbstractContextManager[Any]:
        """Entered around every forward pass by the thread that runs it."""
        return nullcontext()
