"""How a CPU reference is registered for an operator of torch_npu, and how it refuses a wrong call.

A reference is named like its operator and takes arguments named and ordered like the wheel's schema; one that differs
cannot be registered. It states what the operator demands beyond the schema with `require`: shapes that must agree,
dtypes, ranges of values, which torch_npu's meta kernels do not check.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from npu_emulator.dispatch import implement

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALF)
references: dict[str, Callable[..., Any]] = {}  # "npu::npu_rms_norm" -> on CPU tensors


class WrongCall(RuntimeError):
    """The device's operator would refuse this call, or read what is not there."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise WrongCall(message)


def require_dtype(what: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    require(tensor.dtype in allowed, f"{what} is {tensor.dtype}; the operator takes {', '.join(map(str, allowed))}")


def require_shape(what: str, tensor: torch.Tensor, *shape: int) -> None:
    require(tuple(tensor.shape) == shape, f"{what} is {list(tensor.shape)} and has to be {list(shape)}")


def npu_operator(name: str, namespace: str = "npu") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function for `name` ("npu_x" or "npu_x.overload").

    Arguments it leaves out, or takes as **rest, are those it ignores. Raises TypeError where names or order differ.
    """
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        wanted = [a.name for a in operator._schema.arguments]
        kinds = inspect.Parameter
        taken = [p for p, v in inspect.signature(function).parameters.items()
                 if v.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
        if taken != [w for w in wanted if w in taken]:
            raise TypeError(f"{namespace}::{name}: the reference takes {taken}, the schema has {wanted}")
        references[f"{namespace}::{name}"] = function
        implement(namespace, name, operator, function)
        return function

    return register
