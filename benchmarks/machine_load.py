"""Who used the machine's cores during a measurement: the client, the server's processes, others. Linux only."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def _tree_seconds(pid: int) -> float:
    """CPU seconds of a process and its living descendants."""
    total = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _machine_seconds() -> float:
    t = psutil.cpu_times()
    return t.user + t.nice + t.system + t.irq + t.softirq


class MachineLoad:
    """Counts from construction to `stop`."""

    def __init__(self, server_pid: int | None) -> None:
        self._pid = server_pid
        self._wall = time.perf_counter()
        self._own = time.process_time()
        self._machine = _machine_seconds()
        self._server = _tree_seconds(server_pid) if server_pid else 0.0

    def stop(self) -> dict[str, float]:
        """client_cpu_s; and with a server of known pid server_cpu_s and busy_others (cores)."""
        wall = time.perf_counter() - self._wall
        own = time.process_time() - self._own
        result = {"client_cpu_s": own, "server_cpu_s": float("nan"), "busy_others": float("nan")}
        if self._pid:
            result["server_cpu_s"] = _tree_seconds(self._pid) - self._server
            others = _machine_seconds() - self._machine - own - result["server_cpu_s"]
            result["busy_others"] = max(0.0, others / wall)
        return result
