"""What of Ascend is on the machine, read from files: device nodes, driver, firmware, CANN. Judges nothing.

The driver's installer writes into /etc/ascend_install.info where it put it. CANN is in /usr/local/Ascend for root,
in ~/Ascend otherwise; before 8.5 in ascend-toolkit/latest, later in cann. What its set_env.sh exports comes first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from xllm_npu.doctor.machine import Machine

INSTALLED = "/etc/ascend_install.info"
MANAGEMENT_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
EXPORTED = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")  # by CANN's set_env.sh
HUAWEI, ACCELERATOR = "0x19e5", "0x12"  # PCI vendor; class: processing accelerator


@dataclass(frozen=True, slots=True)
class Cann:
    home: str
    version: str | None
    operators: str | None  # the operator package's name, e.g. Ascend-cann-910b-ops
    sourced: bool  # set_env.sh has been sourced


@dataclass(frozen=True, slots=True)
class Ascend:
    nodes: tuple[int, ...]  # numbers of /dev/davinciN
    cards: int  # on the PCI bus, where that was looked at
    driver: dict[str, str] | None  # version.info of the driver
    firmware: dict[str, str] | None
    cann: Cann | None
    driver_folder: str = "/usr/local/Ascend/driver"
    group: str = "HwHiAiUser"  # that the device nodes belong to

    @property
    def present(self) -> bool:
        return bool(self.nodes or self.cards)


def look(machine: Machine, *, pci: bool) -> Ascend:
    """`pci`: also ask the PCI bus (hundreds of small files), which shows cards without a driver."""
    nodes = [re.fullmatch(r"/dev/davinci(\d+)", path) for path in machine.matches("/dev/davinci[0-9]*")]
    numbers = tuple(sorted(int(node[1]) for node in nodes if node))
    installed = _fields(machine.read(INSTALLED)) or {}
    driver = f"{installed.get('Driver_Install_Path_Param') or '/usr/local/Ascend'}/driver"
    firmware = f"{installed.get('Firmware_Install_Path_Param') or '/usr/local/Ascend'}/firmware"
    return Ascend(
        nodes=numbers,
        cards=_cards(machine) if pci and not numbers else 0,
        driver=_fields(machine.read(f"{driver}/version.info")),
        firmware=_fields(machine.read(f"{firmware}/version.info")),
        cann=find_cann(machine),
        driver_folder=driver,
        group=installed.get("UserGroup") or "HwHiAiUser",
    )


def find_cann(machine: Machine) -> Cann | None:
    environment = machine.environment
    home = environment.get("HOME", "/root")
    named = [environment.get(name, "") for name in EXPORTED[:2]]
    usual = [f"{root}/{part}" for root in ("/usr/local/Ascend", f"{home}/Ascend")
             for part in ("cann", "ascend-toolkit/latest")]  # fmt: skip
    versioned = machine.matches("/usr/local/Ascend/cann-*")[::-1]
    for place in (*named, *usual, *versioned):
        if place and (_version(machine, place) or machine.exists(f"{place}/set_env.sh")):
            sourced = any(environment.get(name) for name in EXPORTED)
            return Cann(place, _version(machine, place), _operators(machine, place), sourced)
    return None


def set_env(home: str) -> str:
    """The script that belongs to a CANN; that of ascend-toolkit/latest is one folder up."""
    return f"{home.removesuffix('/latest')}/set_env.sh"


def _version(machine: Machine, home: str) -> str | None:
    for path in machine.matches(f"{home}/*-linux/ascend_toolkit_install.info"):
        if version := (_fields(machine.read(path)) or {}).get("version"):
            return version
    return (_fields(machine.read(f"{home}/opp/version.info")) or {}).get("version_dir")


def _operators(machine: Machine, home: str) -> str | None:
    for path in machine.matches(f"{home}/*-linux/ascend_ops_install.info"):
        if name := (_fields(machine.read(path)) or {}).get("package_name"):
            return name
    return None


def _cards(machine: Machine) -> int:
    folders = (path.rpartition("/")[0] for path in machine.matches("/sys/bus/pci/devices/*/vendor"))
    return sum(
        (machine.read(f"{folder}/vendor") or "").strip() == HUAWEI
        and (machine.read(f"{folder}/class") or "").startswith(ACCELERATOR)
        for folder in folders
    )


def _fields(text: str | None) -> dict[str, str] | None:
    """`name=value` lines; None if the file was not there."""
    if text is None:
        return None
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}
