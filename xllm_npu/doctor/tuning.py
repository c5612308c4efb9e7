"""Kernel settings of the host that cost an NPU time: between two steps the device waits for it.

Values are those that Ascend's own inference guides ask for.
"""

from __future__ import annotations

from collections.abc import Iterator

from xllm_npu.doctor.finding import Finding, note, ok
from xllm_npu.doctor.machine import Machine

GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
SWAPPINESS, BALANCING = "/proc/sys/vm/swappiness", "/proc/sys/kernel/numa_balancing"
LITTLE_SWAPPING = 10
CORES_A_DEVICE = 5  # main thread, operator launch, interrupts, release, HTTP


def examine_tuning(machine: Machine, devices: int) -> Iterator[Finding]:
    """`devices`: how many this machine's ranks use."""
    found = [*_governor(machine), *_memory(machine), *_cores(machine, devices)]
    yield from found or [ok("tuning", "host", "set for low latency")]


def _governor(machine: Machine) -> Iterator[Finding]:
    governors = {(machine.read(path) or "").strip() for path in machine.matches(GOVERNORS)} - {"", "performance"}
    if governors:
        yield note(
            "tuning.governor", "host", f"CPU governor {', '.join(sorted(governors))}",
            "cores slow down between steps and launch the next one late", "cpupower frequency-set -g performance",
        )  # fmt: skip


def _memory(machine: Machine) -> Iterator[Finding]:
    swappiness = (machine.read(SWAPPINESS) or "").strip()
    if swappiness.isdigit() and int(swappiness) > LITTLE_SWAPPING:
        yield note(
            "tuning.swappiness", "host", f"vm.swappiness={swappiness}",
            "pages of the server may be swapped out while it waits", "sysctl -w vm.swappiness=0",
        )  # fmt: skip
    if (machine.read(BALANCING) or "0").strip() != "0":
        yield note(
            "tuning.numa-balancing", "host", "kernel.numa_balancing is on",
            "the kernel unmaps pages to see who uses them, and steps wait for the faults",
            "sysctl -w kernel.numa_balancing=0",
        )  # fmt: skip


def _cores(machine: Machine, devices: int) -> Iterator[Finding]:
    cores = machine.cores()
    if cores < CORES_A_DEVICE * devices:
        yield note(
            "tuning.cores", "host", f"{cores} usable cores for {devices} devices",
            f"below {CORES_A_DEVICE} for each, launching operators competes with everything else",
            "give the container or process more cores, or use fewer devices",
        )  # fmt: skip
