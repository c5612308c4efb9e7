"""The modules of xllm_kernels_npu, for operator sets that use them where a Triton for the device is installed."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def load(module: str) -> ModuleType | None:
    """None without Triton."""
    try:
        return importlib.import_module(f"xllm_kernels_npu.{module}")
    except ImportError:
        return None
