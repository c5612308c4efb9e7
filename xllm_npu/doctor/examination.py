"""Which checks are made when: `examine` all of them, `quick_look` those that take milliseconds.

NPU checks count where an NPU is here or asked for; on other machines what is installed for one is looked at all the
same, and faults of it are notes. What is not where it is looked for is a note too, if torch_npu sees a device: then it
is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from xllm_npu.doctor import host
from xllm_npu.doctor.ascend import Ascend, look
from xllm_npu.doctor.cluster import examine_cluster
from xllm_npu.doctor.conflicts import examine_conflicts
from xllm_npu.doctor.devices import devices_needed, examine_chips, examine_nodes
from xllm_npu.doctor.finding import Finding, ok, problem, softened
from xllm_npu.doctor.machine import Machine, ThisMachine
from xllm_npu.doctor.software import examine_software
from xllm_npu.doctor.tuning import examine_tuning

if TYPE_CHECKING:
    from xllm_npu.config.settings import Settings

NOT_FOUND = ("npu.none", "driver.missing", "cann.missing", "cann.not-sourced")


def examine(
    settings: Settings, machine: Machine | None = None, other_models: Iterable[Settings] = ()
) -> list[Finding]:
    """Everything. Takes seconds: imports torch and starts npu-smi. Of further models, whether they are here."""
    machine = machine or ThisMachine()
    wanted = settings.execution.platform
    ascend = look(machine, pci=True)
    on_npus = _on_npus(ascend, wanted)
    platforms = list(host.examine_platforms(wanted, "npu" if on_npus else wanted))
    npu = _npu(machine, ascend, settings, quick=False)
    return [
        *host.examine_packages(machine),
        *host.examine_foreign_triton(machine, wanted),
        *(_seen_to_work(npu) if any(f.code == "platform.npu" for f in platforms) else npu),
        *examine_cluster(machine, settings, devices=on_npus),
        *platforms,
        *host.examine_limits(machine, settings),
        *(finding for one in (settings, *other_models) for finding in host.examine_model(one)),
        *host.examine_compiler(machine),
        *host.examine_address(machine, settings),
    ]


def quick_look(settings: Settings, machine: Machine | None = None) -> list[Finding]:
    """What can be seen without starting a program, importing torch or walking the PCI bus."""
    machine = machine or ThisMachine()
    wanted = settings.execution.platform
    ascend = look(machine, pci=False)
    findings = [*host.examine_foreign_triton(machine, wanted)]
    if _on_npus(ascend, wanted):
        findings += _npu(machine, ascend, settings, quick=True)
    return [*findings, *examine_cluster(machine, settings, devices=_on_npus(ascend, wanted))]


def _on_npus(ascend: Ascend, wanted: str) -> bool:
    return wanted == "npu" or (wanted == "auto" and ascend.present)


def _npu(machine: Machine, ascend: Ascend, settings: Settings, *, quick: bool) -> list[Finding]:
    wanted = settings.execution.platform
    if wanted not in ("npu", "auto"):
        return []
    if not _on_npus(ascend, wanted):
        return [ok("npu.none", "npu", "none on this machine"), *softened(_leftovers(machine, ascend, settings))]
    findings = []
    if not ascend.present:
        findings.append(_absent())
    findings += examine_software(machine, ascend, graphs=settings.execution.enable_graph)
    findings += [*examine_nodes(machine, ascend, settings), *examine_conflicts(machine, settings)]
    if not quick and ascend.present:
        findings += [*examine_chips(machine, ascend, settings), *examine_tuning(machine, devices_needed(settings))]
    return findings


def _seen_to_work(findings: Iterable[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield from softened([finding]) if finding.code in NOT_FOUND else [finding]


def _absent() -> Finding:
    return problem(
        "npu.none", "npu", "none on this machine, there is no /dev/davinci*", "--platform npu needs one",
        "in a container: docker run --device /dev/davinci0 and more, see docs/install-npu.md",
    )  # fmt: skip


def _leftovers(machine: Machine, ascend: Ascend, settings: Settings) -> Iterator[Finding]:
    """Where there is no NPU: only what somebody has installed for one."""
    software = examine_software(machine, ascend, graphs=False)
    here = {
        "driver": ascend.driver is not None,
        "cann": ascend.cann is not None,
        "torch-npu": machine.installed("torch-npu") is not None,
        "triton": machine.installed("triton-ascend") is not None,
    }
    yield from (f for f in software if here.get(f.code.partition(".")[0], False))
