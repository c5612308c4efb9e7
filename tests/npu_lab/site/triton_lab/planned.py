"""What a planned HIVM module takes of on-chip memory, and where it fell back to scalar code. Reads text only.

Every buffer is a hivm.hir.pointer_cast of constant addresses to a memref of static shape. Not planned at this stage:
L0A and L0B, which matrix products pass through.
"""

from __future__ import annotations

import re
from math import prod

SPACES = {"ub": "ub", "cbuf": "l1", "cc": "l0c"}  # HIVM's name of an address space -> ours
LIMITS = {"ub": 192 << 10, "l1": 512 << 10, "l0c": 128 << 10}
_BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64, "f64": 64}
_CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d+) : i64")
_BUFFER = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:]*: memref<((?:\d+x)*)(\w+)[^#>]*#hivm\.address_space<(\w+)>")
_SCALAR = re.compile(r"memref\.(?:load|store)[^\n]*: memref<((?:\d+x)*)\w+[^\n]*address_space<ub>")


def memory_peaks(hivm: str) -> dict[str, int]:
    """Bytes of one core's ub, l1 and l0c in use at the highest address, the most of all functions (a kernel with
    matrix products has one for each kind of unit).
    """
    peaks = dict.fromkeys(LIMITS, 0)
    for function in re.split(r"(?=\n +func\.func )", hivm):
        constants = {name: int(value) for name, value in _CONSTANT.findall(function)}
        for addresses, shape, element, space in _BUFFER.findall(function):
            if space not in SPACES:
                continue
            size = (prod(int(n) for n in shape.split("x") if n) * _BITS[element] + 7) // 8
            for address in re.findall(r"%\w+", addresses):
                peaks[SPACES[space]] = max(peaks[SPACES[space]], constants[address] + size)
    return peaks


def scalar_accesses(hivm: str) -> int:
    """Loads and stores of single elements of UB: what a vector operation becomes that the chip has not, such as
    addition of int64, division of integers, a gather or a scan. Buffers of one element are not counted: what is one
    number is no loop.
    """
    return sum(prod(int(n) for n in shape.split("x") if n) > 1 for shape in _SCALAR.findall(hivm))
