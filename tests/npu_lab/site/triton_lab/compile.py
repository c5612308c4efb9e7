"""A @triton.jit function to the last stage before Ascend's own assembler, with neither an NPU nor CANN.

    TTIR     triton-ascend's front end and its passes
    linalg   triton-ascend's lowering for bishengir
    HIVM     bishengir-compile of the ascendnpu-ir wheel: on-chip memory planned, synchronisation placed

The step after, hivmc (HIVM to a device ELF), ships only with CANN. A stand-in of that name on PATH keeps what
bishengir-compile hands to it. Knows nothing of this project's kernels.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend import compiler as ascend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DEFAULT_TARGET = "Ascend910B3"
_FLAGS = ("--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true", "--enable-auto-multi-buffer=true",
          "--enable-auto-bind-sub-block=true", "--enable-hivm-compile=true")  # what triton-ascend's launcher passes
_KEEPER = """#!{python}
import shutil, sys
for word in sys.argv[1:]:
    if not word.startswith("-"):
        shutil.copy(word, {kept!r})
        break
if "--version" in sys.argv:
    print("hivmc 1.2.0")
if "-o" in sys.argv:
    out = sys.argv[sys.argv.index("-o") + 1]
    for name in (out, out if out.endswith(".o") else out + ".o"):
        open(name, "wb").close()
"""


class CompileError(RuntimeError):
    """What the compiler says; an overflow of on-chip memory reads "ub overflow, requires N bits while M bits ..."."""


@dataclass(frozen=True, slots=True)
class Lowered:
    name: str  # of the entry function in `linalg`
    linalg: str
    mix_mode: str  # aiv: vector units only; aic: the cube only; mix: both


def binaries() -> Path:
    """The folder of bishengir-compile and bishengir-opt."""
    found = importlib.util.find_spec("ascendnpuir")
    assert found is not None, "ascendnpu-ir is not installed"
    return Path(next(iter(found.submodule_search_locations or ()))) / "bin"


def to_linalg(
    function: Any, signature: Mapping[str, str], constants: Mapping[str, Any], target: str = DEFAULT_TARGET
) -> Lowered:
    """`signature` names the arguments that are no constexpr, in order. Raises CompileError."""
    chip = GPUTarget("npu", target, 0)
    backend = ascend.AscendBackend(chip)
    options = backend.parse_options({})
    source = ASTSource(fn=function, signature=dict(signature), constants=dict(constants), attrs=None)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {**options.__dict__, "target": chip}
    modules = backend.get_module_map() if hasattr(backend, "get_module_map") else {}
    try:
        module = source.make_ir(options, backend.get_codegen_implementation(), modules, context)
        module = ascend.make_ttir(module, metadata, options)
        linalg = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{function.__name__}: {error.stderr or error}") from error
    linalg, metadata = ascend._parse_linalg_metadata(linalg, metadata)
    return Lowered(metadata["kernel_name"], linalg, metadata["mix_mode"])


def to_hivm(linalg: str, target: str = DEFAULT_TARGET) -> str:
    """The planned module's text. Raises CompileError."""
    with tempfile.TemporaryDirectory() as folder:
        source, keeper, kept = (Path(folder) / name for name in ("kernel.mlir", "hivmc", "kept.mlir"))
        source.write_text(linalg)
        keeper.write_text(_KEEPER.format(python=sys.executable, kept=str(kept)))
        keeper.chmod(0o755)
        command = [binaries() / "bishengir-compile", source, f"--target={target}", *_FLAGS, "-o", f"{folder}/kernel.o"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=folder,
                             env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
        if ran.returncode or not kept.exists():
            raise CompileError((ran.stdout + ran.stderr).strip() or f"bishengir-compile ended with {ran.returncode}")
        return kept.read_text()
