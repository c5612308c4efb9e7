"""The allocator as the plugin configures it, mapping physical pages: the device's and the graphs' tests once more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.npu_lab
HERE = Path(__file__).parent


@pytest.mark.slow
def test_devices_and_graphs() -> None:
    files = [str(HERE / name) for name in ("test_device.py", "test_graph.py", "test_virtual_memory.py")]
    environment = {**os.environ, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], env=environment,
                          capture_output=True, text=True, timeout=240, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-6000:]
