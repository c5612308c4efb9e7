"""What is particular to the CPU plugin: threads and how they wait, limits, names."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil
import pytest
from xllm_platform.base import PlatformError
from xllm_platform.cpu import cgroup, topology
from xllm_platform.cpu.device import CpuPlatform

CONFIGURE = """
import json, os, sys
from xllm_platform.cpu.device import CpuPlatform
CpuPlatform().configure_process({threads})
"""

SHOW_ENVIRONMENT = (
    "heavy = [m for m in ('torch', 'numba') if m in sys.modules]\n"
    "print(json.dumps([{k: v for k, v in os.environ.items() if k.startswith(('OMP', 'GOMP', 'NUMBA'))}, heavy]))"
)


def test_process_is_configured_before_any_openmp_runtime_is_loaded(run_python) -> None:
    environment, heavy = run_python(CONFIGURE.format(threads=3) + SHOW_ENVIRONMENT)
    assert not heavy
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["NUMBA_NUM_THREADS"] == "3"
    assert 0 < int(environment["GOMP_SPINCOUNT"]) <= 2000  # a long spin starves pre-empted threads


def test_what_the_user_has_set_stays(run_python) -> None:
    environment, _ = run_python(
        CONFIGURE.format(threads=None) + SHOW_ENVIRONMENT,
        OMP_NUM_THREADS="1,2",
        GOMP_SPINCOUNT="7",
        NUMBA_THREADING_LAYER="tbb",
    )
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["GOMP_SPINCOUNT"] == "7"
    assert environment["NUMBA_THREADING_LAYER"] == "tbb"


def test_default_is_one_thread_a_core(run_python) -> None:
    environment, _ = run_python(CONFIGURE.format(threads=None) + SHOW_ENVIRONMENT)
    assert int(environment["OMP_NUM_THREADS"]) == topology.allowed_cores()


def test_thread_count_is_checked() -> None:
    with pytest.raises(PlatformError, match="at least 1"):
        CpuPlatform().configure_process(0)


def test_threads_are_also_set_when_torch_is_loaded_already(run_python) -> None:
    counts = run_python(
        "import torch\n" + CONFIGURE.format(threads=1) + "print(json.dumps([torch.get_num_threads()]))",
        OMP_NUM_THREADS="2",
    )
    assert counts == [1]


def test_numba_kernels_may_run_from_several_threads(run_python) -> None:
    """numba's last-choice layer ends the process when two threads start parallel loops at the same time."""
    try:
        ctypes.CDLL("libgomp.so.1.0.0")
    except OSError:
        pytest.skip("this machine has no OpenMP runtime that numba can load (libgomp1)")
    layer, threads, sums = run_python(
        CONFIGURE.format(threads=2)
        + """
import threading
import numba, numpy as np, torch

@numba.njit(parallel=True)
def total(x, rounds):
    out = 0.0
    for _ in range(rounds):
        for i in numba.prange(x.shape[0]):
            out += x[i]
    return out

x = np.ones(2000)
total(x, 1)
start, sums = threading.Barrier(2), []
def work():
    start.wait()
    sums.append(total(x, 300))
pair = [threading.Thread(target=work) for _ in range(2)]
[t.start() for t in pair]; [t.join() for t in pair]
print(json.dumps([numba.threading_layer(), torch.get_num_threads(), sums]))
"""
    )
    assert layer == "omp"
    assert threads == 2
    assert sums == [600000.0, 600000.0]


def test_memory_is_the_containers_where_it_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = cgroup.MemoryLimit(limit=1000, used=400)
    monkeypatch.setattr(cgroup, "memory_limit", lambda: limit)
    memory = CpuPlatform().memory_info()
    assert (memory.free, memory.total) == (600, 1000)


def test_memory_is_the_machines_where_the_container_may_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = cgroup.MemoryLimit(limit=1 << 60, used=0)
    monkeypatch.setattr(cgroup, "memory_limit", lambda: limit)
    memory = CpuPlatform().memory_info()
    assert memory.total == psutil.virtual_memory().total
    assert memory.free <= memory.total


def fake_processors(folder: Path, cores: list[tuple[int, int]]) -> Path:
    for number, (package, core) in enumerate(cores):
        topology_folder = folder / f"cpu{number}" / "topology"
        topology_folder.mkdir(parents=True)
        (topology_folder / "physical_package_id").write_text(f"{package}\n")
        (topology_folder / "core_id").write_text(f"{core}\n")
    return folder


def test_hardware_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    two_threads_a_core = fake_processors(tmp_path, [(0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0)])
    assert topology.allowed_cores(two_threads_a_core, quota=100) == 3
    assert topology.allowed_cores(two_threads_a_core, quota=2.5) == 2
    assert topology.allowed_cores(two_threads_a_core, quota=0.5) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    assert topology.allowed_cores(two_threads_a_core, quota=100) == 1
    assert topology.allowed_cores(tmp_path / "no topology here", quota=100) == 2


def test_processor_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nvendor_id\t: X\nmodel name\t: Fast Chip 9000\n\nmodel name\t: other\n")
    assert topology.processor_name(info) == "Fast Chip 9000"
    assert topology.processor_name(tmp_path / "absent").endswith("processor")


@pytest.mark.parametrize(("line", "fast"), [
    ("flags\t\t: fpu sse2 avx avx2 fma avx512f avx512dq avx512bw avx512vl", True),
    ("flags\t\t: fpu avx2 avx_vnni avx_ne_convert", True),
    ("flags\t\t: fpu avx2 avx512f avx512bw", False),
    ("flags\t\t: fpu sse2 avx avx2 fma", False),
    ("Features\t: fp asimd i8mm bf16", True),
    ("Features\t: fp asimd", False),
])  # fmt: skip
def test_which_processors_multiply_bfloat16(tmp_path: Path, line: str, fast: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: some\n{line}\n")
    assert topology.multiplies_bfloat16(cpuinfo) == fast


def test_the_processors_flags_and_torch_agree() -> None:
    torch = pytest.importorskip("torch")
    assert topology.multiplies_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
