"""Operators on npu tensors: aten's by their CPU kernels, npu's and atb's by the references of this package.

Tensors, allocator, streams, events, virtual memory and NPUGraph are torch_npu's own. While a stream captures, an
operator does not run: it becomes a node of the graph and runs at replay; while a task group is updated, the call
replaces the recorded node. Graphs hold addresses, not tensors: memory that is given back too early is read as what it
has become. An operator with neither a CPU kernel nor a reference raises.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from npu_emulator import fake_cann
from npu_emulator.device_memory import on_host
from torch.utils import _pytree as pytree

calls: Counter[str] = Counter()  # operators that ran, "name:capture" recorded, "name:update" replaced

# Metadata, allocation and transfers keep torch_npu's own kernels.
_KEPT = frozenset([
    "empty", "empty_strided", "empty_like", "empty_with_swapped_memory_format", "set_", "resize_", "resize_as_",
    "record_stream", "is_pinned", "_pin_memory", "_reshape_alias", "_copy_from", "_copy_from_and_resize",
    "_has_compatible_shallow_copy_type", "detach", "view", "as_strided", "unfold", "_local_scalar_dense", "copy_",
    "_to_copy", "to", "contiguous", "alias", "squeeze", "unsqueeze", "view_as_real", "view_as_complex", "equal",
    "_unsafe_view", "is_set_to", "set_data", "_resize_output_", "storage_offset", "clone",
])
_libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "npu", "atb")}
_copy_schema = torch.ops.aten.copy_.default._schema
_clone_operator = torch.ops.aten.clone.default
_device_copy: Any = None  # torch_npu's copy_
_captured: set[int] = set()  # addresses of tensors made in the capture that goes on


def install() -> None:
    """Once, after torch_npu was imported."""
    global _device_copy
    if _device_copy is not None:
        return
    _device_copy = torch.library.get_kernel("aten::copy_", "PrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            if name.startswith("aten::"):
                _replace_aten(name.removeprefix("aten::"))
        for name, kernel in (("copy_", _copy), ("clone", _clone), ("_to_copy", _to_copy)):
            _libraries["aten"].impl(name, kernel, "PrivateUse1", allow_override=True)
        operators = importlib.import_module("npu_emulator.operators")
        for module in pkgutil.iter_modules(operators.__path__):
            importlib.import_module(f"npu_emulator.operators.{module.name}")
    # What can make a graph go on, and so raise the error of an operator in it.
    for owner, name in ((torch.npu.NPUGraph, "replay"), (torch.npu.ExternalEvent, "record")):
        setattr(owner, name, _raising(getattr(owner, name)))
    begin = torch.npu.NPUGraph.capture_begin

    def capture_begin(*args: Any, **kwargs: Any) -> None:
        _captured.clear()
        begin(*args, **kwargs)

    torch.npu.NPUGraph.capture_begin = capture_begin


def _raising(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def call(*args: Any) -> None:
        method(*args)
        fake_cann.raise_error_of_replay()

    return call


def implement(namespace: str, name: str, operator: Any, reference: Callable[..., Any]) -> None:
    """`reference` takes CPU tensors and returns such; written arguments it writes in place."""
    kernel = functools.partial(invoke, operator._schema, reference)
    _libraries[namespace].impl(name, kernel, "PrivateUse1", allow_override=True)


def _replace_aten(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if packet in _KEPT or operator is None:
        return
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns)
    if not views:
        implement("aten", name, operator, operator)


def invoke(schema: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run or record `function`, which is of this schema, on npu tensors; returns what the operator returns."""
    stream = torch.npu.current_stream().npu_stream
    state = fake_cann.submit(stream)
    calls[schema.name + ("", ":capture", ":update")[state]] += 1
    host_args, host_kwargs = pytree.tree_map(on_host, (args, kwargs))
    results = _written(schema, args, kwargs)
    if state == fake_cann.RUNS:
        found = function(*host_args, **host_kwargs)
        results = _new_tensors(found, kwargs, args, copy=True)[0] if results is None else results
        return results if schema.returns else None
    outputs: list[torch.Tensor] = []
    if results is not None and state == fake_cann.CAPTURES and _only_of_the_capture(results):
        function(*host_args, **host_kwargs)
    if results is None and schema.returns:
        shapes = function(*_untouched(schema, host_args), **_untouched_named(schema, host_kwargs))
        # What it makes of its inputs as they are now: later operators of the capture check values too.
        results, outputs = _new_tensors(shapes, kwargs, args, copy=state == fake_cann.CAPTURES)
        _captured.update(output.untyped_storage().data_ptr() for output in outputs)
    targets = [on_host(output) for output in outputs]

    def node() -> None:
        found = function(*host_args, **host_kwargs)
        for target, value in zip(targets, _tensors(found)):
            target.copy_(value)

    fake_cann.record(stream, node)
    return results if schema.returns else None


def _only_of_the_capture(results: Any) -> bool:
    """Whether what is written was made in this capture: it may show already what the graph will write."""
    tensors = _tensors(results)
    return bool(tensors) and all(tensor.untyped_storage().data_ptr() in _captured for tensor in tensors)


def _written(schema: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns that returns arguments of its own, else None."""
    out = kwargs.get("out")
    if isinstance(out, list | tuple):  # Tensor[] out, which npu schemas do not mark as written
        return tuple(out)
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if not schema.returns:
        return ()
    if not all(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
        return None
    found = [kwargs[name] if (name := schema.arguments[i].name) in kwargs else args[i] for i in written]
    return found[0] if len(schema.returns) == 1 else tuple(found)


def _new_tensors(found: Any, kwargs: Any, args: Any, copy: bool) -> tuple[Any, list[torch.Tensor]]:
    """`found` with an npu tensor for each CPU tensor, and those."""
    outputs: list[torch.Tensor] = []
    if found is None:
        return None, outputs
    device = kwargs.get("device") or next((t.device for t in _tensors((args, kwargs)) if t.device.type == "npu"), None)

    def new(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        output = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device or "npu")
        outputs.append(output)
        if copy:
            on_host(output).copy_(value)
        return output

    return pytree.tree_map(new, found), outputs


def _untouched(schema: Any, args: Any) -> list[Any]:
    """Positional arguments with copies of what the operator writes."""
    return [_copy_if_written(argument, value) for argument, value in zip(schema.arguments, args)]


def _untouched_named(schema: Any, kwargs: Any) -> dict[str, Any]:
    by_name = {argument.name: argument for argument in schema.arguments}
    return {name: _copy_if_written(by_name[name], value) for name, value in kwargs.items()}


def _copy_if_written(argument: Any, value: Any) -> Any:
    written = argument.alias_info is not None and argument.alias_info.is_write
    return value.clone() if written and isinstance(value, torch.Tensor) else value


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Plain transfers take torch_npu's own path (aclrtMemcpyAsync). Casts and strides run where the device would run a
    kernel, so that what crosses between host and device is counted.
    """
    plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if plain and target.shape == source.shape:
        return _transfer(target, source, non_blocking)
    if target.device == source.device:
        return invoke(_copy_schema, torch.ops.aten.copy_.default, target, source)
    if source.device.type == "npu":  # made contiguous on the device, cast on the host
        target.copy_(_transfer(torch.empty(source.shape, dtype=source.dtype), source.contiguous(), False))
        return target
    staged = source.to(target.dtype).expand(target.shape).contiguous()
    if target.is_contiguous():
        return _transfer(target, staged, non_blocking)
    return invoke(_copy_schema, torch.ops.aten.copy_.default, target, _transfer(torch.empty_like(
        staged, device=target.device), staged, non_blocking))


def _transfer(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    keys = torch._C._dispatch_keys(target) | torch._C._dispatch_keys(source)
    only_device = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return _device_copy.call_boxed(keys & only_device, target, source, non_blocking)


def _clone(tensor: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
    if torch.npu.is_current_stream_capturing():
        return invoke(_clone_operator._schema, _clone_operator, tensor, memory_format=memory_format)
    return torch.empty_like(tensor, memory_format=memory_format or torch.preserve_format).copy_(tensor)


def _to_copy(
    tensor: torch.Tensor, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> torch.Tensor:
    target = torch.empty_like(tensor, dtype=dtype or tensor.dtype, device=device or tensor.device,
                              memory_format=memory_format or torch.preserve_format)
    return target.copy_(tensor, non_blocking)


assert "torch_npu" in sys.modules, "npu_emulator.dispatch is imported once torch_npu is there"
