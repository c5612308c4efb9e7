"""The processors this process may use: how many cores, what the processor calls itself, what it multiplies.

Cores, not hardware threads: two threads on one core share its vector units, so a second one makes matrix
products slower. Linux only (affinity, /proc, /sys); where a file is missing the count of allowed processors
is used.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

from xllm_platform.cpu import cgroup

SYSTEM_CPUS = Path("/sys/devices/system/cpu")


def allowed_cores(system_cpus: Path = SYSTEM_CPUS, quota: float | None = None) -> int:
    """Physical cores in the process's affinity mask, not more than its cgroup's quota (read if not given); at
    least 1."""
    processors = sorted(os.sched_getaffinity(0))
    cores = {_core(system_cpus / f"cpu{n}" / "topology", n) for n in processors}
    quota = cgroup.cpu_quota() if quota is None else quota
    limit = len(cores) if quota is None else math.floor(quota)
    return max(1, min(len(cores), limit))


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model name of the first processor, e.g. 'AMD EPYC 9R14'; the architecture where /proc has none
    (arm64)."""
    return _first(cpuinfo, "model name", "Model", "cpu model") or f"{platform.machine() or 'unknown'} processor"


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether oneDNN has fast bfloat16 products for the processor: its conditions on x86-64, Arm's own flag."""
    flags = set((_first(cpuinfo, "flags", "Features") or "").split())
    return bool(flags & {"avx_ne_convert", "bf16"}) or {"avx512bw", "avx512vl", "avx512dq"} <= flags


def _first(cpuinfo: Path, *keys: str) -> str:
    """What stands behind the first line that has one of the keys and is not empty."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys and value.strip():
            return value.strip()
    return ""


def _core(topology: Path, number: int) -> tuple[str, str]:
    try:
        return (topology / "physical_package_id").read_text().strip(), (
            topology / "core_id"
        ).read_text().strip()
    except OSError:
        return "", str(number)  # no topology (some virtual machines): every processor counts
