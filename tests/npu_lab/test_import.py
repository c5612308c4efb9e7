"""The wheel imports over the fake CANN, has the operators that were written down, and says why where it cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from xllm_platform import registry

from tests.npu_lab import dump_schemas, run
from tests.support.server import ServerProcess
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.npu_lab
HERE = Path(__file__).parent
PROBE = "from xllm_platform import registry; print(registry.probe('npu'))"


def output(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_emulated_device_is_there() -> None:
    assert registry.probe("npu").ok
    assert torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == "Ascend910B3"


def test_schemas_are_those_written_down() -> None:
    assert dump_schemas.lines() == (HERE / "schemas.txt").read_text().splitlines()


def test_without_a_device_the_probe_says_so() -> None:
    answer = output(PROBE, run.environment(run.ZERO_DEVICES))
    assert "sees no Ascend device" in answer


@pytest.mark.slow
def test_hidden_devices_are_named() -> None:
    answer = output(PROBE, run.environment(run.ZERO_DEVICES) | {"ASCEND_RT_VISIBLE_DEVICES": "7"})
    assert "ASCEND_RT_VISIBLE_DEVICES=7" in answer


def test_without_cann_the_probe_says_so() -> None:
    answer = output(PROBE, run.environment(cann=None))
    assert "CANN cannot be loaded" in answer
    assert "set_env.sh" in answer


@pytest.mark.slow
def test_without_cann_the_cpu_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu is installed and cannot be loaded: `auto` is the CPU, and no process falls over torch_npu."""
    for name in ("NPU_LAB", "LD_LIBRARY_PATH", "PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    with ServerProcess(make_tiny_model(tmp_path / "model"), tmp_path / "server") as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_auto_takes_the_npu() -> None:
    assert registry.select("auto").name == "npu"


@pytest.mark.parametrize(("soc", "dtypes", "attention", "kernels"), [
    ("Ascend910B3", ("bfloat16", "float16", "float32"), ("npu", "triton", "torch"), "npu"),
    pytest.param("Ascend910_9382", ("bfloat16", "float16", "float32"), ("npu", "triton", "torch"), "npu",
                 marks=pytest.mark.slow),
    pytest.param("Ascend310P3", ("float16", "float32"), ("torch",), "torch", marks=pytest.mark.slow),
])
def test_what_a_chip_can_do(soc: str, dtypes: tuple[str, ...], attention: tuple[str, ...], kernels: str) -> None:
    code = """
from xllm_platform import registry
found = registry.select('npu').capabilities
print(found.dtypes, found.attention_backends, found.kernels)
"""
    answer = output(code, run.environment() | {"FAKECANN_SOC": soc})
    assert answer.splitlines()[-1] == f"{dtypes} {attention} {kernels}"
