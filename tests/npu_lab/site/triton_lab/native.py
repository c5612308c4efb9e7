"""The linalg that goes to the NPU's compiler, compiled for this machine's CPU instead and called.

linalg -> [bishengir-opt, upstream MLIR's passes] -> LLVM dialect -> [libtriton] LLVM IR -> [llvmlite] native code; the
grid is a loop over program ids, one program after another. That runs triton-ascend's own lowering of masks, pointers
and scattered loads, which Triton's interpreter passes by. LLVM IR is kept in build/npu-lab, by content.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from triton._C.libtriton import ir as triton_ir
from triton._C.libtriton import llvm as triton_llvm
from triton_lab.compile import CompileError, binaries, to_linalg

_HERE = Path(__file__).resolve().parent
_KEPT = _HERE.parents[3] / "build/npu-lab/triton"
_PASSES = (
    "--convert-elementwise-to-linalg", "--linalg-generalize-named-ops", "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true bufferize-function-boundaries=true",
    "--buffer-deallocation-pipeline", "--canonicalize", "--convert-linalg-to-loops", "--convert-scf-to-cf",
    "--expand-strided-metadata", "--lower-affine", "--convert-math-to-llvm", "--convert-math-to-libm", "--arith-expand",
    "--convert-arith-to-llvm", "--convert-index-to-llvm", "--finalize-memref-to-llvm", "--convert-func-to-llvm",
    "--convert-cf-to-llvm", "--canonicalize", "--cse", "--reconcile-unrealized-casts")
_SIZES = {"float": 4, "half": 2, "bfloat": 2, "double": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
_SIZE_OF = re.compile(r"i64 mul \(i64 ptrtoint \(ptr getelementptr \((\w+), ptr null, i32 1\) to i64\), i64 (\d+)\)")
_SCALARS = {"fp32": ctypes.c_float, "fp64": ctypes.c_double, "i1": ctypes.c_bool, "i8": ctypes.c_int8,
            "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64}


class NativeKernel:
    """`run(grid, arguments)`: arguments in the signature's order, pointers as (address, number of elements)."""

    def __init__(self, function: Any, signature: Mapping[str, str], constants: Mapping[str, Any]) -> None:
        lowered = to_linalg(function, signature, constants)
        self.signature = dict(signature)
        self._engine = _native(_llvm_ir(lowered.linalg))
        self._address = self._engine.get_function_address(lowered.name)

    def run(self, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        types: list[Any] = []
        values: list[Any] = []
        pointers = ((0, 0), (0, 0))  # lock and workspace of the NPU's launcher, which nothing uses here
        for kind, value in (*(("*", pointer) for pointer in pointers), *zip(self.signature.values(), arguments)):
            if kind.startswith("*"):  # a memref of rank 1: allocated, aligned, offset, size, stride
                types += [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3]
                values += [value[0], value[0], 0, value[1], 1]
            else:
                types.append(_SCALARS[kind])
                values.append(value)
        call = ctypes.CFUNCTYPE(None, *types, *[ctypes.c_int32] * 6)(self._address)
        sizes = (*grid, 1, 1)[:3]
        for z in range(sizes[2]):
            for y in range(sizes[1]):
                for x in range(sizes[0]):
                    call(*values, *sizes, x, y, z)


def _llvm_ir(linalg: str) -> str:
    kept = _KEPT / (hashlib.sha256("".join((linalg, *_PASSES)).encode()).hexdigest()[:32] + ".ll")
    if kept.exists():
        return kept.read_text()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "linalg.mlir", Path(folder) / "llvm.mlir"
        source.write_text(linalg)
        ran = subprocess.run([binaries() / "bishengir-opt", source, *_PASSES, "-o", target],
                             capture_output=True, text=True)
        if ran.returncode:
            raise CompileError(ran.stderr)
        context = triton_ir.context()
        triton_ir.load_dialects(context)
        module = triton_ir.parse_mlir_module(str(target), context)
        module.context = context
        triton_llvm.init_targets()
        text = str(triton_llvm.to_module(module, triton_llvm.context()))
    # llvmlite's LLVM has no multiplication in constant expressions: sizeof(T) * N is folded here.
    text = _SIZE_OF.sub(lambda found: f"i64 {_SIZES[found[1]] * int(found[2])}", text)
    write_atomically(kept, text.encode())
    return text


def _native(text: str) -> Any:
    _load_runtime()
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_default_triple().create_target_machine(
        opt=2, cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten())
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(2))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


@cache
def _load_runtime() -> ctypes.CDLL:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    source = _HERE / "runtime.c"
    built = _KEPT / f"runtime-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "runtime.so"
            subprocess.run([os.environ.get("CC", "gcc"), "-O2", "-shared", "-fPIC", source, "-o", made], check=True)
            write_atomically(built, made.read_bytes())
    library = ctypes.CDLL(str(built))
    for name in ("memrefCopy", "__truncsfbf2"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return library


def write_atomically(path: Path, content: bytes) -> None:
    """Several processes may write the same file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)
