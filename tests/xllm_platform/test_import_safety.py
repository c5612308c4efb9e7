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
        ("raise ImportError('libtorch_npu.so: version mismatch')", "belong together"),
        ("raise OSError('libhccl.so: undefined symbol')", "libhccl.so"),
        ("import torch, types; torch.npu = types.SimpleNamespace(is_available=lambda: False)", "npu-smi"),
    ],
)
def test_npu_probe_says_what_is_wrong_with_torch_npu(run_python, tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "torch_npu.py").write_text(body)
    ok, reason = run_python(
        "import json, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from xllm_platform.npu import device\n"
        "device.CANN_LIBRARY = 'libc.so.6'\n"  # a library that can be loaded
        "a = device.NpuPlatform.probe()\n"
        "print(json.dumps([a.ok, a.reason]))",
        ASCEND_RT_VISIBLE_DEVICES="5",
    )
    assert not ok
    assert said in reason


def test_npu_probe_says_that_cann_is_missing_without_importing_torch_npu(run_python, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise AssertionError('imported')")
    ok, reason = run_python(
        "import json, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from xllm_platform.npu import device\n"
        "device.CANN_LIBRARY = 'libascendcl-that-is-not-there.so'\n"
        "a = device.NpuPlatform.probe()\n"
        "print(json.dumps([a.ok, a.reason]))"
    )
    assert not ok
    assert "set_env.sh" in reason


@pytest.mark.parametrize(
    ("files", "variable", "said"),
    [
        ([], "0", "built without CUDA"),
        (["lib/libtorch_cuda.so"], "", "hidden from this process (CUDA_VISIBLE_DEVICES=)"),
        (["lib/libtorch_cuda.so"], "0", "no NVIDIA driver"),
    ],
)
def test_cuda_probe_says_why_not_without_importing_torch(
    run_python, tmp_path: Path, files: list[str], variable: str, said: str
) -> None:
    torch_package = tmp_path / "torch"
    (torch_package / "lib").mkdir(parents=True)
    (torch_package / "__init__.py").write_text("raise AssertionError('imported')")
    for name in files:
        (torch_package / name).touch()
    ok, reason = run_python(
        "import json, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from xllm_platform.cuda import device\n"
        "device.DRIVER_LIBRARY = 'libcuda-that-is-not-there.so'\n"
        "a = device.CudaPlatform.probe()\n"
        "print(json.dumps([a.ok, a.reason]))",
        CUDA_VISIBLE_DEVICES=variable,
    )
    assert not ok
    assert said in reason


def test_choosing_the_cpu_loads_nothing_before_it_is_configured(run_python) -> None:
    """GOMP_SPINCOUNT has no effect once torch has loaded its OpenMP runtime."""
    name, loaded = run_python(
        "import json, sys\n"
        "from xllm_platform import registry\n"
        "platform = registry.select('auto')\n"
        "platform.configure_process()\n"
        "print(json.dumps([platform.name, 'torch' in sys.modules]))",
        CUDA_VISIBLE_DEVICES="",
        ASCEND_RT_VISIBLE_DEVICES="",
    )
    if name != "cpu":
        pytest.skip(f"{name} is usable here")
    assert not loaded
