"""`npu-smi info`, read.

The table has two rows a chip: `NPU, Name | Health | ...` and `Chip, Phy-ID | Bus-Id | ... used / total`, in MB; where
a chip has HBM its pair stands last. A second table lists processes. Columns' widths and titles differ between drivers
(24.1 to 26.0 and the 310P's own were seen), so rows are told apart by what is in them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
_NAME = re.compile(r"(\d+)\s+(\S+)")
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip (a die of a card that has two). Memory in MB."""

    index: int  # its number in the whole machine
    name: str  # 910B3, Ascend910, 310P3
    health: str  # OK, Warning, Alarm, Critical, UNKNOWN
    used: int
    total: int

    @property
    def family(self) -> str:
        """A2, A3, 310P, A5, or the name where it is none of these."""
        name = self.name.upper()
        if name.startswith("910B"):
            return "A2"
        if name == "ASCEND910" or name.startswith(("910_93", "ASCEND910_93")):
            return "A3"  # both dies of a 910C are shown without a letter
        return "310P" if name.startswith("310P") else "A5" if name.startswith(("950", "ASCEND950")) else self.name


@dataclass(frozen=True, slots=True)
class Report:
    driver: str | None
    chips: tuple[Chip, ...] = ()
    processes: dict[str, int] = field(default_factory=dict)  # name -> MB, on all chips together


def parse(text: str) -> Report:
    """What the output says; no chips if there are none in it."""
    found = _VERSION.search(text)
    chips: list[Chip] = []
    processes: dict[str, int] = {}
    pending: tuple[str, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and _BUS.fullmatch(cells[1]) and pending:
            chips.append(_chip(pending, cells, len(chips)))
            pending = None
        elif len(cells) == 3 and (named := _NAME.fullmatch(cells[0])) and not _BUS.fullmatch(cells[1]):
            pending = (named[2], cells[1])
        elif len(cells) == 4 and cells[1].isdigit() and cells[3].isdigit():
            name = cells[2] or f"process {cells[1]}"
            processes[name] = processes.get(name, 0) + int(cells[3])
    return Report(found[1] if found else None, tuple(chips), processes)


def _chip(pending: tuple[str, str], cells: list[str], count: int) -> Chip:
    name, health = pending
    numbers = cells[0].split()
    used, total = (int(n) for n in (_PAIR.findall(cells[2]) or [(0, 0)])[-1])
    index = int(numbers[1]) if len(numbers) > 1 and numbers[1].isdigit() else count
    return Chip(index, name, health, used, total)
