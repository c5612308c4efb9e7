"""Compiles kernels for NVIDIA GPUs ahead of time, with upstream Triton and the ptxas of its wheel; needs no GPU."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from xllm_kernels_npu.kernel import CompileCase, Kernel

WARP_SIZE = 32
# Compute capability -> bytes of shared memory that one thread block may have (CUDA C++ Programming Guide, table of
# technical specifications per compute capability). 8.0: A100; 9.0: H100, H200.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}


def compile_for_gpu(kernel: Kernel, case: CompileCase, capability: int) -> Any:
    """The compiled kernel with its `asm` (ttir, ttgir, ptx, cubin) and `metadata` (shared, num_warps, ...)."""
    names = kernel.function.arg_names
    assert set(names) == {*case.signature, *case.constants}, f"{kernel.name}, {case.name}: arguments do not match"
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    source = ASTSource(kernel.function, signature, constexprs=dict(case.constants))
    return triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE))
