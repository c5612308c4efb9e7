#!/usr/bin/env python3
"""The schemas of all operators that torch_npu registers, one a line, with the dispatch keys that have a kernel.

    .venv-npu/bin/python tests/npu_lab/run.py tests/npu_lab/dump_schemas.py tests/npu_lab/schemas.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

KEYS = ("PrivateUse1", "Meta", "CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "AutogradPrivateUse1",
        "BackendSelect")


def lines() -> list[str]:
    import torch_npu  # registers them

    found = [f"# torch {torch.__version__.partition('+')[0]}, torch_npu {torch_npu.__version__}"]
    for schema in sorted(torch._C._jit_get_all_schemas(), key=lambda s: (s.name, s.overload_name)):
        if not schema.name.startswith(("npu::", "atb::")):
            continue
        name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        keys = [key for key in KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
        found.append(f"{schema}  # {' '.join(keys)}")
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(lines()) + "\n")
