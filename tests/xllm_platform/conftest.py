"""Fixtures of the platform tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_python() -> Callable[..., Any]:
    """run(code, **environment): run `code` in a fresh interpreter; what it prints is JSON, and is returned.

    Variables that choose thread counts are left out of its environment unless given.
    """

    def run(code: str, **environment: str) -> Any:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "NUMBA_"))}
        env = {**kept, "PYTHONPATH": str(ROOT / "platform"), **environment}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
