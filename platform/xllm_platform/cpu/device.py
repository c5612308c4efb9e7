"""The CPU as a platform: any Linux machine, complete, without streams or a caching allocator.

`configure_process` chooses thread counts and how OpenMP threads wait; it works by environment variables, so
it has to run before torch and numba are imported (later it still sets torch's thread count, but not the
waiting).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from xllm_platform.base import (
    Availability,
    Capabilities,
    GraphBackend,
    MemoryInfo,
    Platform,
    PlatformError,
    VirtualMemoryDriver,
)
from xllm_platform.cpu import cgroup, topology

if TYPE_CHECKING:
    import torch

# How long an OpenMP thread polls before it sleeps, in libgomp's turns. Polling long burns the cores that a
# pre-empted thread needs; not polling pays a wake-up for each of the hundred parallel regions of a decode
# step. 120 bfloat16 products (batch 1, 135M parameters) on 2 cores, median ms when alone, beside a process
# that takes a quarter of a core, and beside one that takes a whole one: 0 turns 9.9, 15.4, 9.6; 1,000 turns
# 7.3, 8.8, 15.7; 10,000 turns 7.0, 9.1, 67.
SPIN_COUNT = "1000"


class CpuPlatform(Platform):
    name = "cpu"
    device_type = "cpu"
    collective_backend = "gloo"

    @classmethod
    def probe(cls) -> Availability:
        if sys.platform != "linux":
            return Availability(False, f"the cpu platform needs Linux, this is {sys.platform}")
        return Availability(True)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            graph="compile",
            virtual_memory=True,
            shared_pages="descriptor",
            shared_memory=True,
            dtypes=("float32", "bfloat16", "float16"),
            slow_dtypes=() if topology.multiplies_bfloat16() else ("bfloat16",),
            default_block_size=128,
            default_tokens_per_batch=1024,  # about half a second of a 135M model on two cores: decodes wait for it
            default_cache_bytes=4 * 2**30,  # the machine is its user's, not ours alone
            default_graph_sizes=(1, 2, 4, 8, 16, 32),
            attention_backends=("numba", "torch"),
            kernels="cpu",
            notes=("float16 is hundreds of times slower than bfloat16 or float32 on a CPU",),
        )

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        if index != 0:
            raise PlatformError(f"There is no cpu device {index}: the machine is one device, cpu:0.")

    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def device_name(self) -> str:
        return topology.processor_name()

    def memory_info(self) -> MemoryInfo:
        import psutil

        machine = psutil.virtual_memory()
        limit = cgroup.memory_limit()
        if limit is None:
            return MemoryInfo(free=machine.available, total=machine.total)
        free = min(machine.available, max(0, limit.limit - limit.used))
        return MemoryInfo(free=free, total=min(machine.total, limit.limit))

    def synchronize(self) -> None:
        """Nothing to wait for: CPU work has ended when its call returns."""

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def graph_backend(self) -> GraphBackend:
        from xllm_platform.cpu.graph import CompileBackend

        return CompileBackend()

    def virtual_memory(self) -> VirtualMemoryDriver:
        from xllm_platform.cpu.virtual_memory import MemfdVirtualMemory

        return MemfdVirtualMemory(lambda: self.memory_info().free)

    def configure_process(self, threads: int | None = None, ranks: int = 1) -> None:
        """threads: None for OMP_NUM_THREADS if set, else this rank's part of the cores this process may use.

        Variables that the user has set stay as they are, but for the thread count when `threads` is given.
        """
        if threads is not None and threads < 1:
            raise PlatformError(f"The number of threads must be at least 1, got {threads}.")
        count = threads or _positive(os.environ.get("OMP_NUM_THREADS")) or max(1, topology.allowed_cores() // ranks)
        os.environ["OMP_NUM_THREADS"] = str(count)
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # milliseconds; for builds with Intel's or LLVM's runtime
        os.environ["NUMBA_NUM_THREADS"] = str(count)
        # numba's fallback layer, workqueue, ends the process when two threads enter parallel loops together.
        os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(count)


def _positive(text: str | None) -> int:
    """OMP_NUM_THREADS may be a list, one number a nesting level; only the first counts here."""
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0
