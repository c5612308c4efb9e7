#!/usr/bin/env python3
"""Runs a Python command where the NPU is emulated: builds the fake CANN if it is not up to date, sets the environment.

    .venv-npu/bin/python tests/npu_lab/run.py -m pytest tests/npu_lab
    .venv-npu/bin/python tests/npu_lab/run.py -m xllm_npu.cli serve MODEL --platform npu
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build/npu-lab"
CANN, ZERO_DEVICES = BUILD / "cann", BUILD / "zero-devices"


def environment(cann: Path | None = CANN) -> dict[str, str]:
    """The calling process's variables with those of the laboratory; cann None: as on a machine that has none."""
    found = {**os.environ, "TASK_QUEUE_ENABLE": "0"}  # operators run on the thread that calls them
    emulated = str(int(cann == CANN))  # a CANN without devices has nothing to emulate
    lab = {"NPU_LAB": emulated, "LD_LIBRARY_PATH": str(cann), "PYTHONPATH": str(HERE / "site")}
    if cann is None:
        return {name: value for name, value in found.items() if name not in lab}
    rest = found.get("PYTHONPATH")
    return {**found, **lab, "PYTHONPATH": f"{lab['PYTHONPATH']}:{rest}" if rest else lab["PYTHONPATH"]}


def main() -> None:
    build = [sys.executable, str(HERE / "fakecann/build.py"), "--out"]
    for command in ([*build, str(CANN)], [*build, str(ZERO_DEVICES), "--zero-devices"]):
        if subprocess.run(command).returncode:
            sys.exit(1)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())


if __name__ == "__main__":
    main()
