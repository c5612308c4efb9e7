"""Huawei Ascend NPUs, by torch_npu. Importing this file imports neither torch nor torch_npu.

Environment: ASCEND_RT_VISIBLE_DEVICES hides devices; PYTORCH_NPU_ALLOC_CONF configures the caching allocator;
HCCL_* configure the collectives. What the user has set is left as it is.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from xllm_platform.accelerator import AcceleratorPlatform
from xllm_platform.base import Availability, Capabilities, GraphBackend, PlatformError, VirtualMemoryDriver
from xllm_platform.npu.acl import CANN_LIBRARY

if TYPE_CHECKING:
    from xllm_platform.parallel import Group

# torch_npu reports the chip by number: 910B (A2) 220-225, 910C (A3) 250-255, 310P 200-205, 950 (A5) from 260.
SOC_310P = range(200, 206)

# Batch sizes of decode graphs: what is padded is little, and the graphs are few.
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


class NpuPlatform(AcceleratorPlatform):
    name = "npu"
    device_type = "npu"
    collective_backend = "hccl"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"

    @classmethod
    def probe(cls) -> Availability:
        if importlib.util.find_spec("torch_npu") is None:
            return Availability(
                False, "torch_npu is not installed; on an Ascend server: pip install 'xllm-npu[npu]'"
            )
        try:  # before torch is imported: the platform chosen instead may have to be configured first
            ctypes.CDLL(CANN_LIBRARY)
        except OSError as error:
            return Availability(False, f"CANN cannot be loaded: {error}; source its set_env.sh")
        try:
            available = bool(cls._runtime().is_available())
        except PlatformError as error:
            return Availability(False, str(error))
        except RuntimeError as error:
            return Availability(
                False, f"the Ascend driver answers with an error: {error}; check `npu-smi info`"
            )
        if not available:
            hidden = os.environ.get(cls.visible_devices_variable)
            seen = f" ({cls.visible_devices_variable}={hidden})" if hidden is not None else ""
            return Availability(
                False, f"torch_npu sees no Ascend device{seen}; check `npu-smi info` and /dev/davinci*"
            )
        return Availability(True)

    def profiler(self, directory: str, name: str) -> Any:
        import torch_npu

        tools = torch_npu.profiler
        return tools.profile(activities=[tools.ProfilerActivity.CPU, tools.ProfilerActivity.NPU],
                             on_trace_ready=tools.tensorboard_trace_handler(directory, worker_name=name))

    @staticmethod
    def _runtime() -> Any:
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise PlatformError(
                f"torch_npu cannot be loaded: {error}; source CANN's set_env.sh, and check that CANN, torch "
                "and torch_npu are versions that belong together"
            ) from error
        import torch

        return torch.npu  # type: ignore[attr-defined]  # torch_npu puts it there

    @property
    def capabilities(self) -> Capabilities:
        # 310P has no bfloat16, no fused inference attention and no Triton; it is the only chip told apart here.
        old = self._soc_version() in SOC_310P
        kernels = ("triton",) if importlib.util.find_spec("triton") is not None else ()  # triton-ascend's name
        return Capabilities(
            graph="none" if old else "capture",
            streams=True,
            pinned_memory=True,
            virtual_memory=True,
            shared_pages="number",
            dtypes=("float16", "float32") if old else ("bfloat16", "float16", "float32"),
            default_block_size=128,  # what the paged attention operators are tuned for
            default_graph_sizes=GRAPH_SIZES,
            attention_backends=("torch",) if old else ("npu", *kernels, "torch"),
            kernels="torch" if old else "npu",
        )

    def configure_process(self, threads: int | None = None, ranks: int = 1) -> None:
        """Task queue and allocator defaults; the host's threads are few because the host only launches."""
        os.environ.setdefault("TASK_QUEUE_ENABLE", "1")
        os.environ.setdefault("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
        os.environ.setdefault("HCCL_OP_EXPANSION_MODE", "AIV")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:  # it read the variable when it was loaded
            importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))

    def graph_backend(self) -> GraphBackend:
        from xllm_platform.npu.graph import NpuCaptureBackend

        runtime = self._runtime()
        return NpuCaptureBackend(runtime, importlib.import_module("torch_npu")._C._weak_ref_tensor)

    def virtual_memory(self) -> VirtualMemoryDriver:
        from xllm_platform.npu.virtual_memory import AclVirtualMemory

        self._runtime().set_device(self._index)  # which initialises AscendCL
        return AclVirtualMemory(self._index)

    def communicator_name(self, group: Group) -> str:
        if group.handle is None:
            raise PlatformError("A group of one has no communicator.")
        backend = group.handle._get_backend(self.device())
        return str(backend.get_hccl_comm_name(group.rank))  # type: ignore[attr-defined]

    def _soc_version(self) -> int:
        """The chip's number; -1 where torch_npu does not tell."""
        read = getattr(importlib.import_module("torch_npu").npu, "get_soc_version", None)
        return int(read()) if read is not None else -1
