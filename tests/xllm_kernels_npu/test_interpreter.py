"""Every kernel's numbers in upstream Triton's interpreter, float32: the sources mean to it what the references say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from xllm_kernels_npu import registry

pytest.importorskip("triton", reason="upstream Triton is in the extra `triton`, which `make test` installs")

from tests.support import kernel_calls

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """What was compared -> the largest difference, of what is allowed."""
    roots = [str(ROOT / part) for part in ("", "platform", "kernels_npu", "models")]
    path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpret_kernels"], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=280,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_kernel_is_called() -> None:
    assert kernel_calls.without_calls() == [], "tests/support/kernel_calls.py does not say how these are called"


@pytest.mark.parametrize("of", [*registry.MODULES, "attention", "latent attention"])
def test_numbers(of: str, differences: dict[str, float]) -> None:
    mine = {name: value for name, value in differences.items() if name.startswith((f"{of}:", f"{of},"))}
    assert mine
    assert {name: value for name, value in mine.items() if not value <= 1} == {}
