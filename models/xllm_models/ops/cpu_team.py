"""Runs compiled kernels on the OpenMP threads that torch already has.

numba's own threading layers bring a second pool: two pools spin against each other on the same cores, and the OpenMP
one needs a system library that a fresh machine may lack. So a kernel here is a plain C function (numba `cfunc`) that
every thread of one team runs; it asks for its rank and the team's size and takes its share.

A kernel receives the address of an int64 array: addresses of tensors, sizes, and doubles as bits (`float_bits`).
The caller keeps the tensors alive and contiguous where the kernel expects it. The GIL is released during a run.
Where torch has no OpenMP the team is one thread. Knows no operator.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
import torch
from numba import njit, types

_NO_RANK = ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: 0)  # kept alive here: kernels hold their addresses
_ONE = ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: 1)
_NOTHING = ctypes.CFUNCTYPE(None)(lambda: None)


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch is linked with, found through torch's own dependencies."""
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "GOMP_parallel") and hasattr(library, "GOMP_barrier") else None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_library = _openmp()
HAS_THREADS = _library is not None
if _library is not None:
    _parallel = _library.GOMP_parallel
    _parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _parallel.restype = None
# Kernels refer to these by name, so that a kernel cached on disk links again in the next process.
llvm.add_symbol("xllm_team_rank", _address(_library.omp_get_thread_num if _library else _NO_RANK))
llvm.add_symbol("xllm_team_size", _address(_library.omp_get_num_threads if _library else _ONE))
llvm.add_symbol("xllm_team_barrier", _address(_library.GOMP_barrier if _library else _NOTHING))

team_rank = types.ExternalFunction("xllm_team_rank", types.int32())
team_size = types.ExternalFunction("xllm_team_size", types.int32())
team_barrier = types.ExternalFunction("xllm_team_barrier", types.void())  # every thread of the team must pass it


@njit(inline="always")
def team_share(total):
    """This thread's part of range(total): (begin, end); parts differ by one at most."""
    rank, size = types.int64(team_rank()), types.int64(team_size())
    return total * rank // size, total * (rank + 1) // size


def run(kernel: int, threads: int, *arguments: int) -> None:
    """Run the kernel at this address on `threads` threads (the caller's is one of them) and wait for it."""
    packed = (ctypes.c_int64 * len(arguments))(*arguments)
    if _library is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel)(ctypes.addressof(packed))
    else:
        _parallel(kernel, packed, threads, 0)


@lru_cache(maxsize=1024)
def float_bits(value: float) -> int:
    """A double as the int64 that `numeric.double_of` turns back."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
