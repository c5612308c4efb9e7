"""Graphs on the CPU: decode through `torch.compile`, one compilation a layer class, not one a layer.

Compiling the unrolled model takes half a minute for each batch size; compiling one layer and using it for all
of them takes a few seconds. `prepare_model` puts a switch before each decoder layer's forward: inside a
graph's capture and replay the compiled function runs, everywhere else (prefill, larger batches) the plain
one.

A model is anything with `layers`, a ModuleList; without it the model itself counts as one layer. A model or a
layer may offer `compile_decode()`, returning a callable with the signature of its `forward`; it then takes
the place of what is done here. A layer's forward may break the graph (attention does), but must not depend on
its own index in traced code, or each layer is compiled anew.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from xllm_platform.base import Graph, GraphBackend, PlatformError

# Compilations of one layer class before torch gives up and silently runs it as plain Python: two (batch 1,
# and one for all larger sizes) for each dtype and code path, with room for models that mix layer kinds in one
# class.
RECOMPILE_LIMIT = 64

_mode = threading.local()


class CompiledStep(Graph):
    """A decode step whose layers run compiled. There is nothing static but the code: `replay` calls `run`
    again."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run

    def replay(self) -> torch.Tensor:
        with _compiled():
            return self._run()


class CompileBackend(GraphBackend):
    def __init__(self) -> None:
        self._shared: dict[type, Callable[..., Any]] = {}  # layer class -> its compiled forward

    def prepare_model(self, model: torch.nn.Module) -> None:
        require_compiler()
        _configure_compiler()
        if hasattr(model, "compile_decode"):
            _switch(model, model.compile_decode())  # type: ignore[operator]
            return
        for layer in getattr(model, "layers", None) or [model]:
            _switch(layer, self._compiled_forward(layer))

    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        """Compiles what is not compiled yet, by running it once."""
        require_compiler()
        graph = CompiledStep(run)
        try:
            graph.replay()
        except Exception as error:
            if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                raise PlatformError(
                    f"The decode step cannot be compiled: {error}. Turn enable_graph off."
                ) from error
            raise
        return graph

    def _compiled_forward(self, layer: torch.nn.Module) -> Callable[..., Any]:
        if hasattr(layer, "compile_decode"):
            return layer.compile_decode()  # type: ignore[operator]
        kind = type(layer)
        if kind not in self._shared:
            self._shared[kind] = torch.compile(kind.forward)
        shared = self._shared[kind]
        return lambda *args, **kwargs: shared(layer, *args, **kwargs)


def require_compiler() -> None:
    """Raise PlatformError if torch.compile has no C++ compiler or no Python headers to compile with."""
    compiler = os.environ.get("CXX", "").split()
    if not any(shutil.which(name) for name in (*compiler[:1], "g++", "clang++")):
        raise PlatformError(
            "Graphs on the CPU are compiled and there is no C++ compiler: install g++, or turn "
            "enable_graph off."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise PlatformError(
            f"Graphs on the CPU are compiled against Python's headers and {header} is missing: install "
            "python3-dev (python3-devel), or turn enable_graph off."
        )


def _configure_compiler() -> None:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    dynamo.allow_unspec_int_on_nn_module = True  # a layer's number is an input, not a reason to compile again
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # A handful of kernels is compiled; a pool of processes that each import torch would cost more time
        # and memory than it saves, and could outlive an engine that is killed.
        inductor.compile_threads = 1


def _switch(module: torch.nn.Module, compiled: Callable[..., Any]) -> None:
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if getattr(_mode, "compiled", False) else plain)(*args, **kwargs)

    module.forward = forward


@contextmanager
def _compiled() -> Iterator[None]:
    _mode.compiled = True
    try:
        yield
    finally:
        _mode.compiled = False
