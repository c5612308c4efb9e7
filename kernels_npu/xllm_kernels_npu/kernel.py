"""How a kernel describes itself: its function, what it is compiled for ahead of time, and what it may use on the chip.

Knows neither Triton nor a device. On-chip memory of one core of Ascend 910B and 910C: unified buffer (UB, vector
operations) 192 KiB, L1 512 KiB, L0A and L0B 64 KiB each, L0C (sums of matrix products) 128 KiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLOAT_TYPES = {"fp16": 2, "bf16": 2, "fp32": 4}  # Triton's names, with their bytes
UB_BYTES = 192 << 10
TARGETS = ("Ascend910B3", "Ascend910_9382")  # as bishengir-compile names them: Atlas A2, Atlas A3


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One way to call a kernel, compiled ahead of time for every target."""

    name: str
    signature: Mapping[str, str]  # argument -> "*bf16", "i32", "fp32", ...; those that are no constexpr, in order
    constants: Mapping[str, Any]  # constexprs


@dataclass(frozen=True, slots=True)
class Kernel:
    """A @triton.jit function and its limits. A case that plans more UB, or falls back to more scalar accesses of UB,
    than stated here fails the laboratory.
    """

    function: Any  # triton.JITFunction
    cases: tuple[CompileCase, ...]
    ub_budget: int  # bytes of UB a core plans at most, all cases
    scalar_accesses: int = 0  # places in the compiled code where UB is read or written one element at a time
    scalar_reason: str = ""  # why these are harmless; required where there are any

    def __post_init__(self) -> None:
        assert self.ub_budget <= UB_BYTES
        assert bool(self.scalar_accesses) == bool(self.scalar_reason)

    @property
    def name(self) -> str:
        return str(self.function.__name__)
