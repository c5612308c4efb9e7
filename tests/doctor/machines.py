"""Machines made of dictionaries: whatever a check may ask for, as a server of the named kind would answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch

from xllm_npu.config.load import load
from xllm_npu.config.settings import Settings
from xllm_npu.doctor.machine import Answer

GIB = 2**30
CANN = "/usr/local/Ascend/cann"
TRITON = "/venv/triton"
NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")


@dataclass
class FakeMachine:
    """A `Machine`. `files`: path -> text; a device node or folder is a file without text."""

    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    packages: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    networks: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"lo": ("127.0.0.1",), "eth0": ("10.0.0.7",)})
    free: int = 100 * GIB
    shared: int | None = 2 * GIB
    files_allowed: int = 65536
    core_count: int = 64
    compiler: str | None = "/usr/bin/g++"
    address_taken: str = ""
    commands: list[tuple[str, ...]] = field(default_factory=list)

    def system(self) -> str:
        return "Linux aarch64"

    def python(self) -> str:
        return "3.11.7"

    def user(self) -> str:
        return "someone"

    def cores(self) -> int:
        return self.core_count

    def memory(self) -> tuple[int, int]:
        return self.free, 200 * GIB

    def open_files(self) -> int:
        return self.files_allowed

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def exists(self, path: str) -> bool:
        return any(name == path or name.startswith(f"{path}/") for name in self.files)

    def matches(self, pattern: str) -> list[str]:
        found = {"/".join(name.split("/")[: pattern.count("/") + 1]) for name in self.files}
        return sorted(name for name in found if fnmatch(name, pattern) and name.count("/") == pattern.count("/"))

    def may_use(self, path: str) -> bool:
        return path not in self.forbidden

    def capacity(self, path: str) -> int | None:
        return self.shared

    def installed(self, distribution: str) -> str | None:
        return self.packages.get(distribution)

    def package_folder(self, package: str) -> str | None:
        return self.folders.get(package)

    def program(self, *names: str) -> str | None:
        return self.compiler

    def run(self, *command: str) -> Answer | None:
        self.commands.append(command)
        return self.answers.get(command[0])

    def interfaces(self) -> dict[str, tuple[str, ...]]:
        return self.networks

    def address_error(self, host: str, port: int) -> str:
        return self.address_taken


BASICS = dict.fromkeys(("torch", "transformers", "numba", "fastapi", "uvicorn", "pyzmq"), "1.0")


def plain_machine() -> FakeMachine:
    """No NPU, nothing of Ascend."""
    return FakeMachine(packages={**BASICS, "torch": "2.13.0+cpu"})


def ascend_server(devices: int = 8, name: str = "910B3") -> FakeMachine:
    """A server on which everything is as it should be."""
    files = {f"/dev/davinci{n}": "" for n in range(devices)} | dict.fromkeys(NODES, "")
    files["/usr/local/Ascend/driver/version.info"] = (
        "Version=25.5.2\nascendhal_version=7.35.23\ncompatible_version_fw=[6.4.0,6.4.99],[7.0.0,7.8.99]\n"
    )
    files["/usr/local/Ascend/driver/lib64/driver/libascend_hal.so"] = ""
    files["/usr/local/Ascend/firmware/version.info"] = "Version=7.8.0.5.216\nfirmware_version=1.0\n"
    files["/etc/hccn.conf"] = "address_0=192.168.1.1\n"
    files |= cann_files("9.1.0")
    files[f"{TRITON}/backends/ascend/compiler.py"] = ""
    files["/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"] = "performance\n"
    files["/proc/sys/vm/swappiness"], files["/proc/sys/kernel/numa_balancing"] = "0\n", "0\n"
    packages = {**BASICS, "torch": "2.13.0+cpu", "torch-npu": "2.13.0", "triton-ascend": "3.2.0"}
    return FakeMachine(
        environment={"ASCEND_HOME_PATH": CANN, "ASCEND_OPP_PATH": f"{CANN}/opp", "HOME": "/home/someone"},
        files=files, packages=packages, folders={"triton": TRITON},
        answers={"npu-smi": Answer(0, smi_table(devices, name))},
    )  # fmt: skip


def cann_files(version: str, operators: str | None = "Ascend-cann-910b-ops", home: str = CANN) -> dict[str, str]:
    info = f"package_name=Ascend-cann-toolkit\nversion={version}\narch=aarch64\nos=linux\n"
    files = {f"{home}/aarch64-linux/ascend_toolkit_install.info": info, f"{home}/set_env.sh": ""}
    if operators:
        files[f"{home}/aarch64-linux/ascend_ops_install.info"] = f"package_name={operators}\nversion={version}\n"
    return files


def smi_table(devices: int, name: str, health: Iterable[str] = (), used: int = 3400, processes: str = "") -> str:
    """As `npu-smi info` of driver 25.5 prints it for cards of one chip."""
    states = [*health, *["OK"] * devices][:devices]
    rows = "".join(
        f"| {n:<5} {name:<19} | {states[n]:<13} | 97.5        41                0    / 0             |\n"
        f"| 0     {n:<19} | 0000:C{n:X}:00.0  | 0           0    / 0          {used} / 65536         |\n"
        "+===========================+===============+====================================================+\n"
        for n in range(devices)
    )
    return (
        "+------------------------------------------------------------------------------------------------+\n"
        "| npu-smi 25.5.2                   Version: 25.5.2                                               |\n"
        "+---------------------------+---------------+----------------------------------------------------+\n"
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
        "| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |\n"
        f"+===========================+===============+====================================================+\n{rows}"
        "+---------------------------+---------------+----------------------------------------------------+\n"
        "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
        f"+===========================+===============+====================================================+\n{processes}"
        "| No running processes found in NPU 0                                                            |\n"
    )


def settings(*words: str) -> Settings:
    return load(list(words), {})[0].settings
