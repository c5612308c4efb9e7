"""Plugins can be imported and probed on a machine that has neither their device nor their vendor packages."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["npu", "cuda", "cpu"])
def test_importing_a_plugin_imports_no_heavy_package(run_python, name: str) -> None:
    loaded = run_python(
        "import json, sys\n"
        "from xllm_platform import registry\n"
        f"registry.load({name!r})\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    assert not {"torch", "torch_npu", "triton", "acl", "numba", "cuda"} & set(loaded)


def test_npu_probe_says_that_torch_npu_is_missing(run_python) -> None:
    found = run_python(
        "import json, sys\n"
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch_npu' else real(name, *rest)\n"
        "from xllm_platform.npu.device import NpuPlatform\n"
        "a = NpuPlatform.probe()\n"
        "print(json.dumps([a.ok, a.reason, 'torch' in sys.modules]))"
    )
    ok, reason, torch_loaded = found
    assert not ok
    assert "torch_npu is not installed" in reason
    assert "xllm-npu[npu]" in reason
    assert not torch_loaded


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ImportError('libascendcl.so: cannot open shared object file')", "set_env.sh"),
        ("raise OSError('libhccl.so: undefined symbol')", "libhccl.so"),
        ("import torch, types; torch.npu = types.SimpleNamespace(is_available=lambda: False)", "npu-smi"),
    ],
)
def test_npu_probe_says_what_is_wrong_with_torch_npu(
    run_python, tmp_path: Path, body: str, said: str
) -> None:
    (tmp_path / "torch_npu.py").write_text(body)
    ok, reason = run_python(
        "import json, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from xllm_platform.npu.device import NpuPlatform\n"
        "a = NpuPlatform.probe()\n"
        "print(json.dumps([a.ok, a.reason]))",
        ASCEND_RT_VISIBLE_DEVICES="5",
    )
    assert not ok
    assert said in reason


def test_cuda_probe_says_why_not_and_makes_no_context(run_python) -> None:
    ok, reason, initialized = run_python(
        "import json\n"
        "from xllm_platform.cuda.device import CudaPlatform\n"
        "a = CudaPlatform.probe()\n"
        "import torch\n"
        "print(json.dumps([a.ok, a.reason, torch.cuda.is_initialized()]))",
        CUDA_VISIBLE_DEVICES="",
    )
    assert not ok
    assert "CUDA" in reason or "nvidia-smi" in reason
    assert not initialized
