"""What each kernel takes of an Ascend core's on-chip memory: figures.json, which the laboratory writes and checks.

Reads a file; needs neither Triton nor a device.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

FILE = "figures.json"


@dataclass(frozen=True, slots=True)
class Figures:
    """One case of one kernel, compiled for one target; memory in bytes of one core."""

    module: str
    kernel: str
    case: str
    target: str
    units: str  # aiv: vector units; aic: cube; mix: both
    ub: int
    ub_budget: int
    l1: int
    l0c: int
    scalar_accesses: int


def load() -> list[Figures]:
    """In the registry's order."""
    return [Figures(**line) for line in json.loads(resources.files(__package__).joinpath(FILE).read_text())]


def dump(figures: list[Figures]) -> str:
    """The text of figures.json."""
    return "[\n" + ",\n".join(json.dumps(asdict(one)) for one in figures) + "\n]\n"


def table(figures: list[Figures]) -> list[tuple[str, ...]]:
    """A header and a row for each kernel: the most of all its cases, memory in KiB, the largest of the targets."""
    kernels: dict[str, list[Figures]] = {}
    for one in figures:
        kernels.setdefault(one.kernel, []).append(one)
    rows: list[tuple[str, ...]] = [("kernel", "file", "units", "UB KiB", "of budget", "L1 KiB", "L0C KiB", "scalar",
                                    "cases")]
    for name, cases in kernels.items():
        most: dict[str, Any] = {what: max(getattr(one, what) for one in cases) for what in ("ub", "l1", "l0c")}
        rows.append((
            name.removesuffix("_kernel"), f"{cases[0].module}.py", "+".join(sorted({one.units for one in cases})),
            *(f"{most['ub'] / 1024:.1f}", f"{cases[0].ub_budget // 1024}"),
            *(f"{most[what] / 1024:.1f}" for what in ("l1", "l0c")),
            str(max(one.scalar_accesses for one in cases)), str(len({one.case for one in cases}))))
    return rows
