"""Gives every Python process of the laboratory the emulated kernels, as soon as it imports torch_npu.

Python imports a module of this name at its start when it finds one: `make test-npu` puts this directory on PYTHONPATH,
so that servers and workers started by tests have an NPU too. Without the fake CANN nothing here happens.
"""

import importlib.abc
import importlib.util
import os
import sys


class AfterTorchNpu(importlib.abc.MetaPathFinder):
    """Finds torch_npu as others would, and installs the emulator once it has been executed."""

    asking = False  # the other finders

    def find_spec(self, name, path=None, target=None):
        if name != "torch_npu" or self.asking:
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
                importlib.import_module("npu_emulator.dispatch").install()

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("NPU_LAB") == "1":
    sys.meta_path.insert(0, AfterTorchNpu())
