"""Compiles every case of every kernel for every target, and keeps what that took: figures.json and docs/kernels.md.

    .venv-npu/bin/python tests/npu_lab/run.py -m triton_lab.figures [MODULE ...]

Without modules, all of them, and both files are written. With modules, their figures are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from triton_lab import planned
from triton_lab.compile import CompileError, to_hivm, to_linalg
from xllm_kernels_npu import figures, registry
from xllm_kernels_npu.kernel import TARGETS, CompileCase, Kernel

ROOT = Path(__file__).resolve().parents[4]
JSON = ROOT / "kernels_npu/xllm_kernels_npu" / figures.FILE
DOCUMENT = ROOT / "docs/kernels.md"
BEGIN, END = "<!-- figures: written by triton_lab.figures -->\n", "<!-- end of figures -->\n"


def compile_case(module: str, kernel: Kernel, case: CompileCase, target: str) -> figures.Figures:
    """Raises CompileError, also for what exceeds the limits that the kernel states."""
    where = f"{kernel.name} ({case.name}) for {target}"
    try:
        lowered = to_linalg(kernel.function, case.signature, case.constants, target)
        hivm = to_hivm(lowered.linalg, target)
    except CompileError as error:
        raise CompileError(f"{where}: {error}") from error
    peaks, scalars = planned.memory_peaks(hivm), planned.scalar_accesses(hivm)
    if peaks["ub"] > kernel.ub_budget:
        raise CompileError(f"{where}: plans {peaks['ub']} bytes of UB, above its budget {kernel.ub_budget}")
    if scalars > kernel.scalar_accesses:
        raise CompileError(f"{where}: {scalars} scalar accesses of UB, {kernel.scalar_accesses} are accounted for")
    return figures.Figures(module=module, kernel=kernel.name, case=case.name, target=target, units=lowered.mix_mode,
                           ub_budget=kernel.ub_budget, scalar_accesses=scalars, **peaks)


def compile_modules(modules: Iterable[str]) -> Iterator[figures.Figures]:
    for module in modules:
        for kernel in registry.load(module):
            for case in kernel.cases:
                for target in TARGETS:
                    yield compile_case(module, kernel, case, target)


def document(text: str, found: list[figures.Figures]) -> str:
    """docs/kernels.md with its table replaced."""
    header, *rows = figures.table(found)
    lines = [header, tuple("---" for _ in header), *rows]
    before, rest = text.split(BEGIN)
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return before + BEGIN + table + END + rest.split(END)[1]


def main(modules: list[str]) -> None:
    found = []
    for one in compile_modules(modules or registry.MODULES):
        found.append(one)
        print(f"{one.kernel:32} {one.case:28} {one.target:16} {one.units} ub {one.ub / 1024:.1f} "
              f"l1 {one.l1 / 1024:.1f} l0c {one.l0c / 1024:.1f} scalar {one.scalar_accesses}", flush=True)
    if not modules:
        JSON.write_text(figures.dump(found))
        DOCUMENT.write_text(document(DOCUMENT.read_text(), found))


if __name__ == "__main__":
    main(sys.argv[1:])
