"""The Ascend devices: nodes, permissions, what this process may see, what npu-smi says of them.

`examine_nodes` reads files only; `examine_chips` starts npu-smi.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from xllm_npu.doctor.ascend import MANAGEMENT_NODES, Ascend
from xllm_npu.doctor.finding import Finding, note, ok, problem
from xllm_npu.doctor.machine import Machine
from xllm_npu.doctor.npu_smi import Chip, Report, parse

if TYPE_CHECKING:
    from xllm_npu.config.settings import Settings

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
BUSY = 0.2  # share of a chip's memory; an idle 64 GiB chip shows about 3 GiB in use
OPERATORS = {"A2": "910b", "A3": "a3", "310P": "310p", "A5": "950"}  # part of the operator package's name


def examine_nodes(machine: Machine, ascend: Ascend, settings: Settings) -> Iterator[Finding]:
    """Only for a machine that has a device, or should have one."""
    if not ascend.nodes:
        if ascend.cards:
            yield problem(
                "devices.no-nodes", "devices", f"{ascend.cards} on the PCI bus, none in /dev",
                "the driver makes /dev/davinci*, when it is loaded", "install Ascend HDK, or reboot to load its driver",
            )  # fmt: skip
        return
    if missing := [node for node in MANAGEMENT_NODES if not machine.exists(node)]:
        yield problem(
            "devices.management", "devices", f"{', '.join(missing)} missing", "every process opens them",
            "in a container: docker run " + " ".join(f"--device {node}" for node in missing),
        )  # fmt: skip
    nodes = [f"/dev/davinci{number}" for number in ascend.nodes] + [n for n in MANAGEMENT_NODES if n not in missing]
    if closed := [node for node in nodes if not machine.may_use(node)]:
        yield problem(
            "devices.permission", "devices", f"{machine.user()} may not use {', '.join(closed)}",
            f"they belong to the group that the driver was installed for, {ascend.group}",
            f"usermod -aG {ascend.group} {machine.user()}; in a container, run as that user's number: --user 1000:1000",
        )  # fmt: skip
    yield from _visible(machine, ascend, settings)


def visible(machine: Machine, ascend: Ascend) -> tuple[int, ...] | None:
    """Numbers of the devices that a process sees; None if the variable is not a list of those that are here.

    The variable counts from 0 what is in /dev; a container that was given some devices keeps the host's numbers there.
    """
    listed = machine.environment.get(VISIBLE)
    if listed is None:
        return ascend.nodes
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) < len(ascend.nodes) for part in parts):
        return None
    return tuple(ascend.nodes[int(part)] for part in parts)


def _visible(machine: Machine, ascend: Ascend, settings: Settings) -> Iterator[Finding]:
    seen, listed = visible(machine, ascend), machine.environment.get(VISIBLE)
    if seen is None:
        yield problem(
            "devices.absent", "devices", f"{VISIBLE}={listed}, and there are {len(ascend.nodes)}",
            "the list ends for the process where an entry is wrong", f"name some of 0 to {len(ascend.nodes) - 1}",
        )  # fmt: skip
        return
    if not seen:
        yield problem(
            "devices.hidden", "devices", f"{VISIBLE} is empty", "every device is hidden from the process",
            f"unset {VISIBLE}, or give numbers: 0,1",
        )  # fmt: skip
        return
    needed, index = devices_needed(settings), settings.execution.device_id
    if needed > len(seen):
        yield problem(
            "devices.few", "devices", f"{len(seen)} visible, {needed} needed on this machine",
            "each rank of --tp-size times --dp-size takes one", "give fewer ranks, or more devices",
        )  # fmt: skip
    elif index >= len(seen):
        yield problem(
            "devices.index", "devices", f"--device-id {index}, and {len(seen)} visible",
            "it counts the visible devices from 0", f"give one of 0 to {len(seen) - 1}",
        )  # fmt: skip
    else:
        yield ok("devices", "devices", f"{len(seen)} visible of {len(ascend.nodes)}")


def devices_needed(settings: Settings) -> int:
    """Ranks on this machine, at least one; where Ray places them, one is all that is known."""
    if settings.distributed.placement == "ray":
        return 1
    return -(-settings.parallel.tp_size * settings.parallel.dp_size // settings.distributed.nnodes)


def examine_chips(machine: Machine, ascend: Ascend, settings: Settings) -> Iterator[Finding]:
    """Asks npu-smi."""
    answer = machine.run("npu-smi", "info")
    if answer is None:
        yield note(
            "smi.missing", "npu-smi", "not on the PATH", "the devices' health is unknown",
            "it comes with the driver; in a container, mount /usr/local/bin/npu-smi and /usr/local/dcmi",
        )  # fmt: skip
        return
    report = parse(answer.text)
    if answer.code is None:
        yield problem(
            "smi.hangs", "npu-smi", "does not answer", "the driver is stuck, as after a failed reset",
            "see dmesg; reset the device or reboot the server",
        )  # fmt: skip
    elif answer.code != 0 or not report.chips:
        said = next((line.strip() for line in answer.text.splitlines() if line.strip()), "nothing")
        yield problem(
            "smi.failed", "npu-smi", f"says: {said[:200]}", "the driver does not reach a device",
            f"check that {ascend.driver_folder}/lib64/common and .../driver are in LD_LIBRARY_PATH, that another "
            "container does not hold the devices, and dmesg",
        )  # fmt: skip
    else:
        seen = visible(machine, ascend)
        yield from _health(report, set(seen) if seen else None)
        yield from _fitting(report, ascend, settings)


def _health(report: Report, seen: set[int] | None) -> Iterator[Finding]:
    names = sorted({chip.name for chip in report.chips})
    sick = [chip for chip in report.chips if chip.health != "OK"]
    if not sick:
        yield ok("chips", "chips", f"{len(report.chips)} x {', '.join(names)}, all OK")
    for chip in sick:
        found, todo = f"device {chip.index} ({chip.name}): {chip.health}", f"npu-smi info -t health -i {chip.index}"
        if chip.health == "Warning" or (seen is not None and chip.index not in seen):
            yield note("chips.warning", "chips", found, "it works; its next failure may be near", todo)
        else:
            yield problem(
                "chips.health", "chips", found, "work on it fails or hangs",
                f"{todo} shows the error code; leave the device out with {VISIBLE} until it is repaired",
            )  # fmt: skip
    busy = [c for c in report.chips if c.total and c.used > BUSY * c.total and (seen is None or c.index in seen)]
    if busy:
        users = ", ".join(f"{name} {size:,} MB" for name, size in report.processes.items()) or "other containers"
        yield note(
            "chips.busy", "chips", f"memory in use on device {', '.join(str(c.index) for c in busy)} ({users})",
            "the KV cache gets what is left", f"end those programs, or choose other devices with {VISIBLE}",
        )  # fmt: skip


def _fitting(report: Report, ascend: Ascend, settings: Settings) -> Iterator[Finding]:
    chip: Chip = report.chips[0]
    package, wanted = (ascend.cann.operators if ascend.cann else None), OPERATORS.get(chip.family)
    if wanted is None:
        yield note(
            "chips.unknown", "chips", f"{chip.name} is not among A2, A3, 310P and A5", "nobody has tried it",
            "see that CANN and torch_npu name it",
        )  # fmt: skip
    elif package and f"-{wanted}-" not in package.lower():
        yield problem(
            "cann.other-chip", "CANN", f"{package}, and the chips are {chip.family}",
            "operators are compiled for one family of chips", f"install Ascend-cann-{wanted}-ops, or its image",
        )  # fmt: skip
    if chip.family == "310P" and settings.model.dtype == "bfloat16":
        yield problem(
            "chips.bfloat16", "chips", f"{chip.name} has no bfloat16", "the model is to be computed in it",
            "give --dtype float16",
        )  # fmt: skip
    if chip.family == "310P" and settings.execution.enable_graph:
        yield problem(
            "chips.no-graphs", "chips", f"{chip.name} cannot capture graphs", "--enable-graph is refused at start",
            "leave --enable-graph out",
        )  # fmt: skip
