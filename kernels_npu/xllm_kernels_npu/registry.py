"""All kernels of this package, one line a file. Importing this imports no Triton; `load` does."""

from __future__ import annotations

import importlib

from xllm_kernels_npu.kernel import Kernel

MODULES: dict[str, str] = {
    "rms_norm": "x * rsqrt(mean(x^2) + eps) * weight",
}


def load(module: str) -> tuple[Kernel, ...]:
    """The kernels of `module`, its KERNELS. Raises ImportError where neither triton-ascend nor triton is installed."""
    found: tuple[Kernel, ...] = importlib.import_module(f"xllm_kernels_npu.{module}").KERNELS
    return found
