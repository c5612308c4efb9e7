"""Every kernel also compiles for NVIDIA GPUs, down to machine code that fits a multiprocessor's shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="upstream Triton is in the extra `triton`, which `make test` installs")

from xllm_kernels_npu import registry
from xllm_kernels_npu.kernel import CompileCase, Kernel

from tests.support.gpu_compile import SHARED_BYTES, compile_for_gpu


def _cases(kernel: Kernel) -> list[object]:
    """The first and the last by default, all of them with the slow tests: a case takes half a second or more."""
    few = {kernel.cases[0].name, kernel.cases[-1].name}
    return [pytest.param(kernel, case, id=f"{kernel.name}: {case.name}",
                         marks=() if case.name in few else pytest.mark.slow) for case in kernel.cases]


CASES = [case for module in registry.MODULES for kernel in registry.load(module) for case in _cases(kernel)]


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_compiles(kernel: Kernel, case: CompileCase, capability: int) -> None:
    compiled = compile_for_gpu(kernel, case, capability)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
