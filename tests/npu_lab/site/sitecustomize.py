"""Gives every Python process of the laboratory the emulated kernels, as soon as it imports torch_npu.

Python imports a module of this name at its start when it finds one: `make test-npu` puts this directory on PYTHONPATH,
so that servers and workers started by tests have an NPU too. Without the fake CANN nothing here happens.
"""

import importlib.abc
import importlib.util
import os
import sys


def install_emulator(module):
    importlib.import_module("npu_emulator.dispatch").install()


def let_float32_through(module):
    """For comparisons of tokens with the CPU; the reference of the operator asks the same variable."""
    if os.environ.get("NPU_LAB_FLOAT32") == "1":
        module.NpuAttention.dtypes = frozenset()


def launch_on_the_emulator(module):
    def run(function, *args, **kwargs):
        return importlib.import_module("triton_lab.launch").launch(function, *args, **kwargs)

    module.JITFunction.run = run


AFTER = {
    "torch_npu": install_emulator,
    "xllm_models.attention.npu_attention": let_float32_through,
    "triton.runtime.jit": launch_on_the_emulator,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of `AFTER` as others would, and calls what is to follow once one has been executed."""

    asking = False  # the other finders

    def find_spec(self, name, path=None, target=None):
        if name not in AFTER or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                AFTER[name](module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("NPU_LAB") == "1":
    sys.meta_path.insert(0, AfterImport())
