"""Driver, firmware, CANN, torch, torch_npu and triton: whether each is there, and whether they belong together.

Reads files and installed distributions' versions only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from xllm_npu.doctor.ascend import Ascend, Cann, set_env
from xllm_npu.doctor.finding import Finding, note, ok, problem
from xllm_npu.doctor.machine import Machine
from xllm_npu.doctor.versions import (
    MANY_STREAMS_CANN,
    MANY_STREAMS_DRIVER,
    OLDEST_CANN,
    OLDEST_DRIVER,
    TRITON_CANN,
    adapter_of,
    base_version,
    numbers,
    series,
    shown,
)

INSTALL = "docs/install-npu.md"
REINSTALL_TRITON = "pip uninstall -y triton triton-ascend, then pip install --no-deps triton-ascend, last of all"


def examine_software(machine: Machine, ascend: Ascend, *, graphs: bool) -> Iterator[Finding]:
    yield from _driver(machine, ascend)
    yield from _firmware(ascend)
    yield from _cann(ascend)
    yield from _adapter(machine, ascend.cann)
    yield from _triton(machine, ascend.cann)
    if graphs:
        yield from _streams(ascend)


def _driver(machine: Machine, ascend: Ascend) -> Iterator[Finding]:
    version, folder = (ascend.driver or {}).get("Version"), ascend.driver_folder
    if version is None:
        if not any(machine.matches(f"{folder}/{part}/libascend_hal.so") for part in ("lib64", "lib64/*")):
            yield problem(
                "driver.missing", "driver", f"none in {folder}", "the device is reached through it",
                f"install Ascend HDK; in a container, mount {folder}/lib64 and version.info ({INSTALL})",
            )  # fmt: skip
        else:
            yield note(
                "driver.unknown", "driver", f"{folder}/version.info cannot be read",
                "whether it goes with CANN is unknown", "in a container, mount that file too",
            )  # fmt: skip
        return
    cann = series(ascend.cann.version or "") if ascend.cann else None
    oldest, own = OLDEST_DRIVER.get(cann) if cann else None, series(version)
    if oldest and own and own < oldest and cann:
        yield problem(
            "driver.old", "driver", f"{version}, and CANN {shown(cann)} needs {shown(oldest)} or newer",
            "operators fail or hang on an older driver", "install a newer Ascend HDK, firmware first, or an older CANN",
        )  # fmt: skip
    else:
        yield ok("driver", "driver", version)


def _firmware(ascend: Ascend) -> Iterator[Finding]:
    """The driver says which firmware it goes with: compatible_version_fw=[7.0.0,7.7.99],[...]."""
    version = (ascend.firmware or {}).get("Version")
    ranges = re.findall(r"\[([\d.]+),([\d.]+)\]", (ascend.driver or {}).get("compatible_version_fw", ""))
    if version is None or not ranges:
        return  # containers do not see it
    # The fourth and later numbers are build numbers.
    if any(numbers(low) <= numbers(version)[:3] <= numbers(high) for low, high in ranges):
        yield ok("firmware", "firmware", version)
    else:
        wanted = " or ".join(f"{low} to {high}" for low, high in ranges)
        yield problem(
            "firmware.mismatch", "firmware", f"{version}, and the driver goes with {wanted}",
            "the device may not start, or fail under load", "install the firmware of the driver's own HDK release",
        )  # fmt: skip


def _cann(ascend: Ascend) -> Iterator[Finding]:
    cann = ascend.cann
    if cann is None:
        yield problem(
            "cann.missing", "CANN", "not found in /usr/local/Ascend or ~/Ascend", "torch_npu is made of its operators",
            f"install CANN, toolkit and operators, and source its set_env.sh ({INSTALL})",
        )  # fmt: skip
        return
    if not cann.sourced:
        yield problem(
            "cann.not-sourced", "CANN", f"{cann.home} is there, its environment is not",
            "without it neither its libraries nor its operators are found", f"source {set_env(cann.home)}",
        )  # fmt: skip
    if cann.version is None:
        yield note(
            "cann.unknown", "CANN", f"{cann.home} does not say its version",
            "whether it goes with torch_npu is unknown", "see that CANN was installed completely",
        )  # fmt: skip
        return
    own = series(cann.version)
    if own and own < OLDEST_CANN:
        yield problem(
            "cann.old", "CANN", f"{cann.version}, and this program needs {shown(OLDEST_CANN)} or newer",
            "torch_npu 2.10 and newer call operators it does not have", f"install a newer CANN ({INSTALL})",
        )  # fmt: skip
    elif cann.operators is None and own and own >= (8, 5):
        yield problem(
            "cann.no-operators", "CANN", f"{cann.version} has no operator package",
            "since 8.5 operators are installed separately", "install Ascend-cann-<chip>-ops of the same version",
        )  # fmt: skip
    else:
        yield ok("cann", "CANN", f"{cann.version} in {cann.home}")


def _adapter(machine: Machine, cann: Cann | None) -> Iterator[Finding]:
    torch, adapter = machine.installed("torch"), machine.installed("torch-npu")
    if adapter is None:
        yield problem(
            "torch-npu.missing", "torch_npu", "not installed", "torch reaches the device through it",
            "pip install 'xllm-npu[npu]'",
        )  # fmt: skip
        return
    if torch is not None and base_version(torch) != ".".join(map(str, numbers(adapter)[:3])):
        yield problem(
            "torch-npu.torch", "torch_npu", f"{adapter} with torch {torch}",
            "it is compiled for exactly one version of torch", f"pip install torch=={base_version(adapter)}",
        )  # fmt: skip
        return
    row, own = adapter_of(adapter), series(cann.version or "") if cann else None
    if row is None:
        yield note(
            "torch-npu.unknown", "torch_npu", f"{adapter} is not among the versions known here",
            "whether it goes with this CANN is unknown", f"use one that {INSTALL} names",
        )  # fmt: skip
    elif own and own < row.cann:
        source = "is released for" if row.published else "asks for what came with"
        yield note(
            "torch-npu.cann", "torch_npu", f"{adapter} {source} CANN {shown(row.cann)}, and this is {shown(own)}",
            "operators and graph features that came with the newer one are missing or switched off",
            f"install CANN {shown(row.cann)}, or a torch_npu for {shown(own)}",
        )  # fmt: skip
    else:
        yield ok("torch-npu", "torch_npu", f"{adapter} with torch {torch}" if torch else adapter)


def _triton(machine: Machine, cann: Cann | None) -> Iterator[Finding]:
    """triton-ascend and triton write the same folder; which of them wrote last shows in its backends."""
    version, folder = machine.installed("triton-ascend"), machine.package_folder("triton")
    ascends = folder is not None and machine.exists(f"{folder}/backends/ascend")
    if version is None and folder is None:
        yield note(
            "triton.missing", "triton-ascend", "not installed", "kernels written in Triton cannot be chosen",
            "pip install triton-ascend, as the last package; there is none for 310P",
        )  # fmt: skip
    elif not ascends:
        have = f"{version}, overwritten by" if version else "not installed; there is"
        yield problem(
            "triton.foreign", "triton-ascend", f"{have} triton {machine.installed('triton') or ''}".rstrip(),
            "both write the same folder, and this triton has no Ascend compiler", REINSTALL_TRITON,
        )  # fmt: skip
    else:
        yield from _triton_version(version, cann)


def _triton_version(version: str | None, cann: Cann | None) -> Iterator[Finding]:
    made_for = TRITON_CANN.get(base_version(version or ""))
    own = series(cann.version or "") if cann else None
    if made_for and own and own < made_for:
        yield note(
            "triton.cann", "triton-ascend",
            f"{version} is released for CANN {shown(made_for)}, and this is {shown(own)}",
            "it may ask for more than this CANN has", f"install CANN {shown(made_for)} or an older triton-ascend",
        )  # fmt: skip
    else:
        yield ok("triton", "triton-ascend", version or "of unknown version")


def _streams(ascend: Ascend) -> Iterator[Finding]:
    driver = numbers((ascend.driver or {}).get("Version", ""))
    cann = series(ascend.cann.version or "") if ascend.cann else None
    if (driver and driver < MANY_STREAMS_DRIVER) or (cann and cann < MANY_STREAMS_CANN):
        yield note(
            "graph.streams", "graphs", "before driver 25.5.1 and CANN 8.5 a device has about 1,800 streams",
            "each captured size takes some in every layer; capture fails when none are left (207005, EL0009)",
            "give few --graph-batch-sizes, or update",
        )  # fmt: skip
