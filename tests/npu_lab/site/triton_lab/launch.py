"""Launches of Triton kernels on the emulated device: through the CPU-compiled linalg, in place of a device binary.

`kernel[grid](...)` binds, types and specializes its arguments as Triton does. While a stream captures, the launch
becomes a node of the graph, which holds addresses and not tensors, and runs at replay.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_emulator import dispatch, fake_cann
from triton.runtime.jit import mangle_type
from triton_lab.native import NativeKernel

GRID_LIMIT = 65535  # programs of a launch on the device
_TUNING = frozenset(["num_warps", "num_stages", "num_ctas", "multibuffer"])  # of other devices, or no matter here
_kernels: dict[Any, NativeKernel] = {}


def launch(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for triton.JITFunction.run."""
    assert not warmup
    named = {name: value for name, value in kwargs.items() if name not in _TUNING}
    bound = function.signature.bind(*args, **named)
    bound.apply_defaults()
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in function.params:
        value = bound.arguments[parameter.name]
        specialized = value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        if parameter.is_constexpr or specialized:
            constants[parameter.name] = value
        if not parameter.is_constexpr:
            signature[parameter.name] = "*i8" if value is None else mangle_type(value)
    passed = {name: kind for name, kind in signature.items() if name not in constants}
    key = (function.cache_key, tuple(signature.items()), tuple(constants.items()))
    if key not in _kernels:
        _kernels[key] = NativeKernel(function, passed, constants)
    kernel = _kernels[key]
    sizes = (*(grid(bound.arguments) if callable(grid) else grid), 1, 1)[:3]
    if not 0 < sizes[0] * sizes[1] * sizes[2] <= GRID_LIMIT:
        raise ValueError(f"{function.__name__}: a grid of {sizes}; the device takes 1 to {GRID_LIMIT} programs")
    values = [_argument(function, name, bound.arguments[name]) for name in passed]
    _submit(function.__name__, lambda: kernel.run(sizes, values))


def _argument(function: Any, name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "npu":
        raise ValueError(f"{function.__name__}: {name} is on {value.device}, which the device cannot reach")
    size = value.untyped_storage().nbytes() // value.itemsize - value.storage_offset()
    return value.data_ptr(), size


def _submit(name: str, run: Any) -> None:
    stream = torch.npu.current_stream().npu_stream
    state = fake_cann.submit(stream)
    dispatch.calls[f"triton::{name}" + ("", ":capture", ":update")[state]] += 1
    if state == fake_cann.RUNS:
        run()
    else:
        fake_cann.record(stream, run)


