"""schemathesis against our OpenAPI document: what it makes of it, valid and not, gets no 5xx, no answer that the
document does not know, and none after more than half a minute.

XLLM_NPU_SCHEMATHESIS names its program; `make test-hardening` installs one.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.server import ServerProcess

PROGRAM = os.environ.get("XLLM_NPU_SCHEMATHESIS", "")
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
          "unsupported_method")

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess,
              pytest.mark.skipif(not PROGRAM, reason="needs schemathesis: make test-hardening")]


@pytest.mark.parametrize("phase", ["coverage", "fuzzing,stateful"])
def test_our_document(tiny_dir: Path, tmp_path: Path, phase: str):
    flags = ("--max-model-len", "256", "--responses-store-size", "20")
    with ServerProcess(tiny_dir, tmp_path / "server", *flags) as server:
        run = subprocess.run(
            [os.path.abspath(PROGRAM), "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS),
             "--phases", phase, "--request-timeout", "30", "--max-examples", "60", "--max-time", "60", "--seed", "1",
             "--continue-on-failure", "--no-color"],
            cwd=tmp_path, env=os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS), "PYTHONPATH": ""}, timeout=240,
            capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        server.wait_idle()
