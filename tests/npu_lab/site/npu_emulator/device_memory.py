"""CPU tensors over the memory of npu tensors: the fake device's memory is host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def on_host(value: Any) -> Any:
    """An npu tensor as a CPU tensor over the same bytes, which it does not keep alive; an npu device as the CPU; else
    `value` itself.
    """
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor) or value.device.type != "npu":
        return value
    storage = value.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        raw = torch.empty(0, dtype=torch.uint8)
    else:
        raw = torch.frombuffer((ctypes.c_uint8 * size).from_address(storage.data_ptr()), dtype=torch.uint8)
    view = torch.empty(0, dtype=value.dtype)
    return view.set_(raw.untyped_storage(), value.storage_offset(), value.shape, value.stride())
