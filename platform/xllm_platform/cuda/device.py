"""NVIDIA GPUs, by torch's CUDA module. Importing this file imports neither torch nor triton.

Environment: CUDA_VISIBLE_DEVICES hides devices; PYTORCH_CUDA_ALLOC_CONF configures the caching allocator.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from xllm_platform.accelerator import AcceleratorPlatform, CaptureBackend
from xllm_platform.base import Availability, Capabilities, GraphBackend, PlatformError, VirtualMemoryDriver

DRIVER_LIBRARY = "libcuda.so.1"


class CudaPlatform(AcceleratorPlatform):
    name = "cuda"
    device_type = "cuda"
    collective_backend = "nccl"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def probe(cls) -> Availability:
        """Looks at files before it imports torch: the platform chosen instead may have to be configured
        first."""
        torch_package = importlib.util.find_spec("torch")
        if torch_package is None or torch_package.origin is None:
            return Availability(False, "torch is not installed; pip install 'xllm-npu[cuda]'")
        if not (Path(torch_package.origin).parent / "lib" / "libtorch_cuda.so").exists():
            return Availability(False, "this torch is built without CUDA; install a CUDA build and 'xllm-npu[cuda]'")
        hidden = os.environ.get(cls.visible_devices_variable)
        seen = f" ({cls.visible_devices_variable}={hidden})" if hidden is not None else ""
        if hidden in ("", "-1"):
            return Availability(False, f"all GPUs are hidden from this process{seen}")
        try:
            ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            return Availability(False, f"there is no NVIDIA driver here ({DRIVER_LIBRARY}); check `nvidia-smi`")
        import torch

        if torch.cuda.device_count() == 0:  # asks NVML, makes no context
            return Availability(False, f"no NVIDIA GPU is visible{seen}; check `nvidia-smi` and the driver's version")
        return Availability(True)

    @staticmethod
    def _runtime() -> Any:
        import torch

        if torch.version.cuda is None:
            raise PlatformError(f"this torch ({torch.__version__}) is built without CUDA")
        return torch.cuda

    @property
    def capabilities(self) -> Capabilities:
        bfloat16 = self._runtime().get_device_capability(self._index) >= (8, 0)
        compiled = [name for name in ("flashinfer", "triton") if importlib.util.find_spec(name) is not None]
        return Capabilities(
            graph="capture",
            streams=True,
            pinned_memory=True,
            virtual_memory=_has_bindings(),
            shared_pages="descriptor" if _has_bindings() else "none",
            dtypes=("bfloat16", "float16", "float32") if bfloat16 else ("float16", "float32"),
            default_block_size=128,
            default_graph_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            attention_backends=(*compiled, "cuda", "torch"),
            kernels="cuda",
        )

    def configure_process(self, threads: int | None = None, ranks: int = 1) -> None:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:  # it read the variable when it was loaded
            importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))

    def graph_backend(self) -> GraphBackend:
        from xllm_platform.cuda.unowned import alias

        runtime = self._runtime()
        return CaptureBackend(runtime, runtime.CUDAGraph, alias)

    def virtual_memory(self) -> VirtualMemoryDriver:
        from xllm_platform.cuda.virtual_memory import CudaVirtualMemory

        self._runtime().init()  # the driver's calls need it
        return CudaVirtualMemory(self._index)


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False
