"""Every case of every kernel compiles for both chips within its limits, as figures.json and docs/kernels.md say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import triton
import triton.language as tl
from triton_lab import planned
from triton_lab.compile import CompileError, to_hivm, to_linalg
from triton_lab.figures import DOCUMENT, JSON, compile_case, compile_modules, document
from xllm_kernels_npu import figures, registry
from xllm_kernels_npu.kernel import CompileCase, Kernel
from xllm_kernels_npu.rms_norm import KERNELS

pytestmark = pytest.mark.npu_lab


@pytest.mark.parametrize("module", registry.MODULES)
def test_module_compiles_as_figures_say(module: str) -> None:
    assert list(compile_modules([module])) == [one for one in figures.load() if one.module == module]


def test_files_are_what_the_figures_make_them() -> None:
    known = figures.load()
    assert {one.module for one in known} == set(registry.MODULES)
    assert JSON.read_text() == figures.dump(known)
    assert DOCUMENT.read_text() == document(DOCUMENT.read_text(), known)


@triton.jit
def add(x, y, out, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index) + tl.load(y + index))


@triton.jit
def gather(x, index, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(x + tl.load(index + lane)))


@triton.jit
def product(a, b, out, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    row, inner = tl.arange(0, SIZE)[:, None], tl.arange(0, DEPTH)
    left, right = tl.load(a + row * DEPTH + inner[None, :]), tl.load(b + inner[:, None] * SIZE + tl.trans(row))
    tl.store(out + row * SIZE + tl.trans(row), tl.dot(left, right))


def hivm(function: triton.JITFunction, kind: str, **constants: int) -> str:
    names = [name for name in function.arg_names if name not in constants]
    signature = {name: "*i32" if name == "index" else f"*{kind}" for name in names}
    return to_hivm(to_linalg(function, signature, constants).linalg)


def test_more_than_the_unified_buffer_is_refused() -> None:
    assert planned.memory_peaks(hivm(add, "fp32", BLOCK=4096)) == {"ub": 2 * 4096 * 4, "l1": 0, "l0c": 0}
    with pytest.raises(CompileError, match=r"ub overflow, requires \d+ bits while \d+ bits available"):
        hivm(add, "fp32", BLOCK=65536)


def test_a_product_takes_l1_and_l0c() -> None:
    peaks = planned.memory_peaks(hivm(product, "fp16", SIZE=64, DEPTH=128))
    assert peaks["l0c"] >= 64 * 64 * 4
    assert peaks["l1"] >= 2 * 64 * 128 * 2


@pytest.mark.parametrize(("make", "scalar"), [
    (lambda: hivm(add, "i32", BLOCK=1024), False),
    (lambda: hivm(add, "i64", BLOCK=1024), True),
    (lambda: hivm(gather, "fp32", BLOCK=1024), True),
])
def test_scalar_loops_are_seen(make: Callable[[], str], scalar: bool) -> None:
    assert (planned.scalar_accesses(make()) > 0) == scalar


def test_limits_that_a_kernel_states_hold() -> None:
    kernel = KERNELS[0]
    with pytest.raises(CompileError, match="above its budget 1024"):
        compile_case("rms_norm", replace(kernel, ub_budget=1024), kernel.cases[0], "Ascend910B3")
    signature = {"x": "*fp32", "index": "*i32", "out": "*fp32"}
    fallback = Kernel(gather, (CompileCase("one", signature, {"BLOCK": 1024}),), ub_budget=64 << 10)
    with pytest.raises(CompileError, match="scalar accesses of UB, 0 are accounted for"):
        compile_case("some", fallback, fallback.cases[0], "Ascend910B3")
    allowed = replace(fallback, scalar_accesses=8, scalar_reason="a test")
    assert compile_case("some", allowed, fallback.cases[0], "Ascend910B3").scalar_accesses > 0


@pytest.mark.parametrize(("module", "tile", "changes"), [
    ("rms_norm", "TILE", {"WIDTH": 8192}), ("add_rms_norm", "TILE", {}), ("rotary", "HEADS", {}),
    ("swiglu", "TILE", {}), ("swiglu_quant", "TILE", {}), ("token_bitmask", "TILE", {}),
    ("penalties", "TILE", {}), pytest.param("sampling", "TILE", {}, marks=pytest.mark.slow),
])
def test_a_doubled_tile_overflows(module: str, tile: str, changes: dict[str, int]) -> None:
    """What a kernel's tile size, or the tightness of its budget, guards against; in its case that takes most."""
    kernel = registry.load(module)[0]
    found = {one.case: one.ub for one in figures.load() if one.module == module}
    case = max(kernel.cases, key=lambda one: found[one.name])
    doubled = replace(case, constants={**case.constants, tile: 2 * case.constants[tile], **changes})
    with pytest.raises(CompileError, match=r"ub overflow|above its budget"):
        compile_case(module, kernel, doubled, "Ascend910B3")
