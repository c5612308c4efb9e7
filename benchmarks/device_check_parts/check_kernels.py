"""Every kernel of the registry: numbers against its reference for all dtypes, then time against a copy of as much.

In a dry run upstream Triton's interpreter runs them, in float32. That of Triton 3.6 and older fails with numpy 2.5.
"""

from __future__ import annotations

import os
import sys

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy
import own_tests  # noqa: F401
import torch
import triton
from part import Part
from xllm_kernels_npu import registry

from tests.support import kernel_calls
from tests.support.kernel_calls import Call, Where


def main() -> None:
    part = Part()
    if part.dry_run and interpreter_is_broken():
        part.report("interpreter", skipped="Triton's", show="skipped: this Triton's interpreter and numpy do not fit")
        return
    platform = part.platform()
    device = platform.device()
    dtypes = [torch.float32] if part.dry_run else [getattr(torch, name) for name in platform.capabilities.dtypes]
    for module in registry.MODULES:
        for dtype in dtypes if module in kernel_calls.CALLS else ():
            with part.check(f"{module}, {str(dtype).removeprefix('torch.')}") as found:
                part.need(2)
                worst = 0.0
                for call in kernel_calls.calls(module, Where(device, dtype)):
                    worst = max(worst, kernel_calls.worst(call.run(), call.reference()))
                found |= {"ok": worst <= 1, "of_tolerance": round(worst, 4), "detail": f"{worst:.2f} of the tolerance"}
    rate = part.copy_bytes_per_second(platform)
    part.report("copy", bytes_per_second=round(rate), show=f"{rate / 1e9:,.0f} GB/s read and written")
    for module in registry.MODULES:
        for call in timed(part, module, Where(device, dtypes[0], not part.dry_run)):
            with part.check(f"{module}: {call.name}") as found:
                part.need(2)
                ms = part.median_ms(platform, call.run)
                share = call.bytes_moved / rate / (ms / 1e3)
                speed = f"{call.bytes_moved / ms / 1e6:7,.0f} GB/s  {100 * share:5.1f} % of a copy"
                found |= {"ms": round(ms, 4), "bytes": call.bytes_moved, "of_copy": round(share, 3),
                          "show": f"{ms:9.3f} ms  {speed}"}
        platform.empty_cache()


def interpreter_is_broken() -> bool:
    newest = [tuple(map(int, version.split(".")[:2])) for version in (triton.__version__, numpy.__version__)]
    return newest[0] < (3, 7) and newest[1] >= (2, 5)


def timed(part: Part, module: str, where: Where) -> list[Call]:
    """Of a dry run one call a module: an interpreter takes seconds."""
    calls = list(kernel_calls.calls(module, where)) if module in kernel_calls.CALLS else []
    return calls[:1] if part.dry_run else calls


if __name__ == "__main__":
    main()
