"""Every finding: the machine that gives it, and that the same machine without the fault does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from xllm_platform import registry
from xllm_platform.base import Availability

from tests.doctor.machines import (
    CANN,
    TRITON,
    FakeMachine,
    ascend_server,
    cann_files,
    plain_machine,
    settings,
    smi_table,
)
from xllm_npu.doctor import conflicts, examination
from xllm_npu.doctor.finding import Finding, can_serve
from xllm_npu.doctor.machine import Answer

Change = Callable[[FakeMachine], object]
NPU = ("--platform", "npu")
TWO = (*NPU, "--nnodes", "2", "--tp-size", "16", "--master-node-addr", "10.0.0.1:19888")
WORKS = {"npu": Availability(True), "cuda": Availability(False, "no driver; install it"), "cpu": Availability(True)}


def files(*gone: str, **new: str) -> Change:
    """Takes files away whose path begins so, and adds others (`__` for `/`)."""

    def change(machine: FakeMachine) -> None:
        for path in [path for path in machine.files if path.startswith(gone)] if gone else []:
            del machine.files[path]
        machine.files.update({name.replace("__", "/"): text for name, text in new.items()})

    return change


def cann(version: str, operators: str | None = "Ascend-cann-910b-ops") -> Change:
    def change(machine: FakeMachine) -> None:
        files(CANN)(machine)
        machine.files.update(cann_files(version, operators))

    return change


def driver(version: str, firmware: str = "7.0.0,7.8.99") -> Change:
    text = f"Version={version}\ncompatible_version_fw=[{firmware}]\n"
    return lambda machine: machine.files.update({"/usr/local/Ascend/driver/version.info": text})


def env(**values: str) -> Change:
    return lambda machine: machine.environment.update(values)


def packages(**versions: str | None) -> Change:
    def change(machine: FakeMachine) -> None:
        for name, version in versions.items():
            machine.packages.pop(name.replace("_", "-"), None)
            if version:
                machine.packages[name.replace("_", "-")] = version

    return change


def smi(code: int | None, text: str) -> Change:
    return lambda machine: machine.answers.update({"npu-smi": Answer(code, text)})


def chips(name: str = "910B3", **about: object) -> Change:
    return smi(0, smi_table(8, name, **about))  # type: ignore[arg-type]


def attribute(name: str, value: object) -> Change:
    return lambda machine: setattr(machine, name, value)


def every(*changes: Change) -> Change:
    return lambda machine: [change(machine) for change in changes]


USER = "| 0       0                 | 19341         | VLLMWorker_TP            | 58472                   |\n"
# code -> (mark, words of the command line, what is done to a good Ascend server)
FAULTS: dict[str, tuple[str, tuple[str, ...], Change]] = {
    "driver.missing": ("problem", NPU, files("/usr/local/Ascend/driver")),
    "driver.unknown": ("note", NPU, files("/usr/local/Ascend/driver/version.info")),
    "driver.old": ("problem", NPU, driver("25.0.rc1.1")),
    "firmware.mismatch": ("problem", NPU, driver("25.5.2", "7.0.0,7.7.99")),
    "cann.missing": ("problem", NPU, files(CANN)),
    "cann.not-sourced": ("problem", NPU, lambda m: m.environment.clear()),
    "cann.unknown": ("note", NPU, files(f"{CANN}/aarch64-linux")),
    "cann.old": ("problem", NPU, cann("8.3.RC2", None)),
    "cann.no-operators": ("problem", NPU, cann("9.1.0", None)),
    "cann.other-chip": ("problem", NPU, cann("9.1.0", "Ascend-cann-A3-ops")),
    "torch-npu.missing": ("problem", NPU, packages(torch_npu=None)),
    "torch-npu.torch": ("problem", NPU, packages(torch="2.12.0+cpu")),
    "torch-npu.unknown": ("note", NPU, packages(torch="2.9.0", torch_npu="2.9.0.post6")),
    "torch-npu.cann": ("note", NPU, cann("9.0.0")),
    "triton.missing": ("note", NPU, every(packages(triton_ascend=None), lambda m: m.folders.clear())),
    "triton.foreign": ("problem", NPU, files(TRITON, **{f"{TRITON}__backends__nvidia__driver.py": ""})),
    "triton.cann": ("note", NPU, every(packages(triton_ascend="3.2.2"), cann("9.0.0"))),
    "graph.streams": ("note", (*NPU, "--enable-graph"), driver("25.3.rc1")),
    "npu.none": ("problem", NPU, files("/dev/davinci")),
    "devices.no-nodes": (
        "problem", (), every(files("/dev/davinci"), lambda m: m.files.update(pci_card("0x19e5", "0x120000")))
    ),
    "devices.management": ("problem", NPU, files("/dev/devmm_svm")),
    "devices.permission": ("problem", NPU, lambda m: m.forbidden.add("/dev/davinci3")),
    "devices.hidden": ("problem", NPU, env(ASCEND_RT_VISIBLE_DEVICES="")),
    "devices.absent": ("problem", NPU, env(ASCEND_RT_VISIBLE_DEVICES="0,8")),
    "devices.few": ("problem", (*NPU, "--tp-size", "4"), env(ASCEND_RT_VISIBLE_DEVICES="0,1")),
    "devices.index": ("problem", (*NPU, "--device-id", "2"), env(ASCEND_RT_VISIBLE_DEVICES="0,1")),
    "smi.missing": ("note", NPU, lambda m: m.answers.clear()),
    "smi.hangs": ("problem", NPU, smi(None, "")),
    "smi.failed": ("problem", NPU, smi(255, "dcmi module initialize failed. ret is -8005\n")),
    "chips.health": ("problem", NPU, chips(health=("OK", "Alarm"))),
    "chips.warning": ("note", NPU, chips(health=("Warning",))),
    "chips.busy": ("note", NPU, chips(used=60000, processes=USER)),
    "chips.unknown": ("note", NPU, chips("910ProB")),
    "chips.bfloat16": ("problem", (*NPU, "--dtype", "bfloat16"), chips("310P3")),
    "chips.no-graphs": ("problem", (*NPU, "--enable-graph"), chips("310P3")),
    "env.blocking": ("note", NPU, env(ASCEND_LAUNCH_BLOCKING="1")),
    "env.blocking-graphs": ("problem", (*NPU, "--enable-graph"), env(ASCEND_LAUNCH_BLOCKING="1")),
    "env.task-queue": ("note", NPU, env(TASK_QUEUE_ENABLE="0")),
    "env.interpret": ("note", NPU, env(TRITON_INTERPRET="1")),
    "env.log-level": ("note", NPU, env(ASCEND_GLOBAL_LOG_LEVEL="1")),
    "env.connect-timeout": ("problem", NPU, env(HCCL_CONNECT_TIMEOUT="60")),
    "cluster.interface": ("problem", TWO, env(HCCL_SOCKET_IFNAME="=eth1")),
    "cluster.address": ("problem", TWO, env(HCCL_IF_IP="10.0.0.8")),
    "cluster.disagree": ("note", TWO, env(HCCL_IF_IP="127.0.0.1", HCCL_SOCKET_IFNAME="eth")),
    "cluster.unset": ("note", TWO, lambda m: m.networks.update(eth1=("10.1.0.7",))),
    "cluster.loopback": ("note", (*TWO, "--master-node-addr", "127.0.0.1:19888"), lambda m: None),
    "cluster.device-network": ("note", TWO, files("/etc/hccn.conf")),
    "tuning.governor": ("note", NPU, files(__sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave\n")),
    "tuning.swappiness": ("note", NPU, files(__proc__sys__vm__swappiness="60\n")),
    "tuning.numa-balancing": ("note", NPU, lambda m: m.files.update({"/proc/sys/kernel/numa_balancing": "1\n"})),
    "tuning.cores": ("note", (*NPU, "--tp-size", "8"), attribute("core_count", 39)),
    "packages.missing": ("problem", (), packages(numba=None)),
    "triton.ascend": ("problem", ("--platform", "cuda"), lambda m: None),
    "memory.little": ("note", (), attribute("free", 2**29)),
    "memory.shared": ("note", ("--tp-size", "2"), attribute("shared", 64 * 2**20)),
    "limits.files": ("note", (), attribute("files_allowed", 256)),
    "model.absent": ("note", ("nobody/has-this",), lambda m: None),
    "compiler.missing": ("note", (), attribute("compiler", None)),
    "address.taken": ("problem", (), attribute("address_taken", "Address already in use")),
}  # fmt: skip


def pci_card(vendor: str, kind: str) -> dict[str, str]:
    folder = "/sys/bus/pci/devices/0000:c1:00.0"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": f"{kind}\n"}


@pytest.fixture(autouse=True)
def platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "probe_all", lambda: WORKS)


def seen(machine: FakeMachine, *words: str) -> dict[str, Finding]:
    return {finding.code: finding for finding in examination.examine(settings(*words), machine)}


def faults(findings: Iterable[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.mark != "ok"} - {"model.absent", "platform.unusable"}


def test_a_good_server_has_nothing_to_report() -> None:
    found = seen(ascend_server(), *NPU)
    assert faults(found.values()) == set()
    assert {code for code, finding in found.items() if finding.mark == "ok"} >= {
        "driver", "firmware", "cann", "torch-npu", "triton", "devices", "chips", "tuning", "address"
    }  # fmt: skip
    assert can_serve(found.values())
    assert found["chips"].found == "8 x 910B3, all OK"
    assert faults(seen(ascend_server(), *TWO).values()) == set()


@pytest.mark.parametrize("code", FAULTS)
def test_fault(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, words, break_it = FAULTS[code]
    if code in examination.NOT_FOUND:
        monkeypatch.setattr(registry, "probe_all", lambda: {**WORKS, "npu": Availability(False, "no device")})
    machine = ascend_server()
    break_it(machine)
    found = seen(machine, *words)
    assert code in found, sorted(found)
    assert found[code].mark == mark
    assert can_serve(found.values()) == (mark != "problem") or code in ("model.absent",)
    if code not in ("triton.ascend", "model.absent", "cluster.loopback"):  # what is wrong there is the question itself
        assert code not in faults(seen(ascend_server(), *words).values())


@pytest.mark.parametrize(("version", "oldest", "before"), [
    ("8.5.0", "25.0.rc1.1", "24.1.rc3.7"), ("9.0.0", "25.0.rc1", "24.1.0"),
    ("9.1.1", "25.2.0", "25.0.rc1.1"), ("9.2.0", "25.3.rc1", "25.2.3"),
])  # fmt: skip
def test_the_oldest_driver_of_each_cann(version: str, oldest: str, before: str) -> None:
    machine = ascend_server()
    cann(version)(machine)
    driver(oldest)(machine)
    assert seen(machine, *NPU)["driver"].found == oldest
    driver(before)(machine)
    assert "driver.old" in seen(machine, *NPU)
    driver("26.2.rc1")(machine)
    assert seen(machine, *NPU)["driver"].mark == "ok"


def test_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(ascend_server(), "--platform", "cuda")
    assert (found["platform.unusable"].found, found["platform.unusable"].todo) == ("no driver", "install it")
    assert found["platform.unusable"].mark == "problem"
    assert seen(ascend_server(), *NPU)["platform.unusable"].mark == "note"
    assert seen(ascend_server(), "--platform", "warp")["platform.unknown"].mark == "problem"
    monkeypatch.setattr(registry, "probe_all", lambda: {"cpu": Availability(False, "no")})
    assert seen(plain_machine())["platform.none"].mark == "problem"


def test_an_npu_that_is_here_must_work_even_if_nobody_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "probe_all", lambda: {**WORKS, "npu": Availability(False, "torch_npu fails")})
    found = [f for f in examination.examine(settings(), ascend_server()) if f.what == "platform npu"]
    assert [finding.mark for finding in found] == ["problem"]


def test_virtual_memory_beside_the_allocators_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions without the setting never ask for it; so it is put in here."""
    machine = ascend_server()
    machine.environment["PYTORCH_NPU_ALLOC_CONF"] = "max_split_size_mb:256, expandable_segments:True"
    assert "env.segments" not in seen(machine, *NPU)
    monkeypatch.setattr(conflicts, "flat_values", lambda _: {"enable_vmm_kvcache": True})
    assert seen(machine, *NPU)["env.segments"].mark == "problem"
    machine.environment["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:False"
    assert "env.segments" not in seen(machine, *NPU)


def test_every_code_is_tested_and_says_why_and_what_to_do() -> None:
    folder = Path(examination.__file__).parent
    source = "\n".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    codes = set(re.findall(r'(?:note|problem|mark)\(\s*"([a-z0-9.-]+)"', source))
    assert len(codes) > 50
    own_tests = {"env.segments", "platform.unusable", "platform.unknown", "platform.none"}
    assert codes == set(FAULTS) | own_tests
    for code, (_, words, break_it) in FAULTS.items():
        machine = ascend_server()
        break_it(machine)
        finding = seen(machine, *words)[code]
        assert finding.found, code
        assert finding.why, code
        assert finding.todo, code


def test_without_an_npu_one_line_says_so() -> None:
    found = examination.examine(settings(), plain_machine())
    assert [f.text() for f in found if f.code.startswith("npu")] == ["ok      npu: none on this machine"]
    assert not {f.code.partition(".")[0] for f in found} & {"driver", "cann", "torch-npu", "devices", "chips"}
    assert can_serve(found)
    assert not can_serve(examination.examine(settings(*NPU), plain_machine()))


def test_without_an_npu_what_is_installed_for_one_is_looked_at() -> None:
    machine = plain_machine()
    machine.packages.update({"torch-npu": "2.12.0", "triton-ascend": "3.2.0"})
    machine.folders["triton"] = TRITON
    found = seen(machine)
    assert (found["torch-npu.torch"].mark, found["triton.foreign"].mark) == ("note", "note")
    assert "cann.missing" not in found


def test_other_platforms_do_not_care_about_the_npu() -> None:
    machine = ascend_server()
    files("/usr/local")(machine)
    found = examination.examine(settings("--platform", "cpu"), machine)
    assert can_serve(found)
    assert machine.commands == []


def test_what_is_elsewhere_is_no_problem_if_the_device_works() -> None:
    machine = ascend_server()
    machine.files = {f"{TRITON}/backends/ascend/compiler.py": ""}
    machine.environment.clear()
    found = seen(machine, *NPU)
    assert {code: found[code].mark for code in ("npu.none", "driver.missing", "cann.missing")} == {
        "npu.none": "note", "driver.missing": "note", "cann.missing": "note"
    }  # fmt: skip
    assert can_serve(found.values())


def test_a_driver_that_was_installed_elsewhere() -> None:
    machine = ascend_server()
    for path in [path for path in machine.files if path.startswith("/usr/local/Ascend/driver")]:
        machine.files[path.replace("/usr/local", "/opt")] = machine.files.pop(path)
    installed = "UserName=hw\nUserGroup=hwgroup\nDriver_Install_Path_Param=/opt/Ascend\n"
    machine.files["/etc/ascend_install.info"] = installed
    machine.forbidden.add("/dev/davinci0")
    found = seen(machine, *NPU)
    assert found["driver"].found == "25.5.2"
    assert found["devices.permission"].todo.startswith("usermod -aG hwgroup someone; ")


def test_a_container_with_two_of_the_hosts_devices() -> None:
    machine = ascend_server()
    for number in (0, 1, 2, 3, 4, 7):
        del machine.files[f"/dev/davinci{number}"]
    machine.environment["ASCEND_RT_VISIBLE_DEVICES"] = "1"  # that is /dev/davinci6
    chips(health=["OK"] * 5 + ["Alarm", "OK"])(machine)
    found = seen(machine, *NPU)
    assert found["devices"].found == "1 visible of 2"
    assert found["chips.warning"].found.startswith("device 5 ")
    chips(health=["OK"] * 6 + ["Alarm"])(machine)
    assert seen(machine, *NPU)["chips.health"].found == "device 6 (910B3): Alarm"


def test_ray_may_place_ranks_anywhere() -> None:
    found = seen(ascend_server(1), *NPU, "--tp-size", "16", "--placement", "ray")
    assert "devices.few" not in found


class TestQuickLook:
    def test_starts_nothing_and_reports_what_files_show(self) -> None:
        machine = ascend_server()
        every(env(ASCEND_LAUNCH_BLOCKING="1"), cann("9.0.0"), chips(health=("Alarm",)))(machine)
        found = examination.quick_look(settings(*NPU, "--enable-graph"), machine)
        assert faults(found) == {"env.blocking-graphs", "torch-npu.cann"}
        assert machine.commands == []

    def test_is_silent_where_all_is_well_and_where_there_is_no_npu(self) -> None:
        assert faults(examination.quick_look(settings(*NPU), ascend_server())) == set()
        assert examination.quick_look(settings(), plain_machine()) == []

    def test_does_not_walk_the_pci_bus(self) -> None:
        machine = plain_machine()
        machine.files.update(pci_card("0x19e5", "0x120000"))
        assert examination.quick_look(settings(), machine) == []
        assert "devices.no-nodes" in seen(machine)
