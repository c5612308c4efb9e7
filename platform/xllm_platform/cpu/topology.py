"""The processors this process may use: how many cores, and what the processor calls itself.

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
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return f"{platform.machine() or 'unknown'} processor"


def _core(topology: Path, number: int) -> tuple[str, str]:
    try:
        return (topology / "physical_package_id").read_text().strip(), (
            topology / "core_id"
        ).read_text().strip()
    except OSError:
        return "", str(number)  # no topology (some virtual machines): every processor counts
