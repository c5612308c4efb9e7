"""The host whatever the device: system, packages, platforms, memory, limits, the model, the address to listen on.

`examine_platforms` imports torch where a platform may work; the rest imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xllm_npu.doctor.finding import Finding, note, ok, problem
from xllm_npu.doctor.machine import Machine
from xllm_npu.version import __version__

if TYPE_CHECKING:
    from xllm_npu.config.settings import Settings

PACKAGES = ("torch", "transformers", "numba", "fastapi", "uvicorn", "pyzmq")
VENDOR_PACKAGES = ("torch-npu", "triton-ascend", "triton", "cuda-bindings", "modelscope")
GIB = 2**30
LITTLE_MEMORY = GIB  # the default model with its KV cache and the libraries
LITTLE_SHARED = GIB  # collectives between devices of one machine
SPARE_FILES = 512  # libraries, sockets between processes, devices


def examine_packages(machine: Machine) -> Iterator[Finding]:
    yield ok("system", "system", f"{machine.system()}, {machine.cores()} usable cores")
    yield ok("xllm-npu", "xllm-npu", f"{__version__}, Python {machine.python()}")
    found = {package: machine.installed(package) for package in (*PACKAGES, *VENDOR_PACKAGES)}
    yield ok("packages", "packages", ", ".join(f"{name} {have}" for name, have in found.items() if have) or "none")
    if missing := [name for name in PACKAGES if not found[name]]:
        yield problem(
            "packages.missing", "packages", f"{', '.join(missing)} not installed", "they are imported at start",
            "install xllm-npu with pip: it names them",
        )  # fmt: skip


def examine_foreign_triton(machine: Machine, wanted: str) -> Iterator[Finding]:
    """Where the device is not Ascend's: a triton that is."""
    folder = machine.package_folder("triton")
    if wanted == "cuda" and folder and machine.exists(f"{folder}/backends/ascend"):
        yield problem(
            "triton.ascend", "triton", "triton-ascend is in its folder", "it has no compiler for GPUs",
            "pip uninstall -y triton triton-ascend, then pip install triton",
        )  # fmt: skip


def examine_platforms(wanted: str, expected: str) -> Iterator[Finding]:
    """`expected`: the platform that is to work, where it is not only `auto`."""
    from xllm_platform.registry import probe_all

    found = probe_all()
    for name, availability in found.items():
        if availability.ok:
            yield ok(f"platform.{name}", f"platform {name}", availability.reason or "can be used")
            continue
        reason, _, todo = availability.reason.partition("; ")
        mark, why = (problem, "it is to be used here") if name == expected else (note, "it cannot be chosen here")
        yield mark("platform.unusable", f"platform {name}", reason, why, todo or "nothing, if another one is meant")
    if wanted != "auto" and wanted not in found:
        yield problem(
            "platform.unknown", f"platform {wanted}", "there is none of that name", "--platform asks for it",
            f"use {', '.join(found)} or auto",
        )  # fmt: skip
    elif not any(availability.ok for availability in found.values()):
        yield problem(
            "platform.none", "platforms", "none can be used", "a model needs a device", "see the reasons above"
        )


def examine_limits(machine: Machine, settings: Settings) -> Iterator[Finding]:
    available, total = machine.memory()
    text = f"{available / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    if available < LITTLE_MEMORY:
        yield note(
            "memory.little", "memory", text, "the libraries alone take much of it",
            "end other programs, or choose a smaller model or --max-cache-size",
        )  # fmt: skip
    else:
        yield ok("memory", "memory", text)
    ranks = settings.parallel.tp_size * settings.parallel.dp_size
    shared = machine.capacity("/dev/shm")
    if ranks > 1 and shared is not None and shared < LITTLE_SHARED:
        yield note(
            "memory.shared", "/dev/shm", f"{shared / 2**20:,.0f} MiB", "collectives of several ranks may need more",
            "in a container: docker run --shm-size=1g",
        )  # fmt: skip
    files, needed = machine.open_files(), settings.service.max_concurrent_requests + SPARE_FILES
    if files < needed:
        yield note(
            "limits.files", "open files", f"{files} allowed",
            f"{settings.service.max_concurrent_requests} requests at once need about {needed}",
            f"ulimit -n {max(needed, 65536)}",
        )  # fmt: skip


def examine_model(settings: Settings) -> Iterator[Finding]:
    from xllm_models import hub

    model = settings.model.model
    if Path(model).expanduser().exists():
        yield ok("model", f"model {model}", "is here")
    elif pulled := [entry for entry in hub.list_pulled(settings.model.download_dir) if entry.name == model]:
        yield ok("model", f"model {model}", f"{pulled[0].path} ({pulled[0].bytes / 2**20:,.0f} MiB)")
    else:
        yield note(
            "model.absent", f"model {model}", "is not here yet", "the first start takes as long as getting it",
            f"`serve` gets it; or now: xllm-npu pull {model}",
        )  # fmt: skip


def examine_compiler(machine: Machine) -> Iterator[Finding]:
    if found := machine.program("g++", "clang++", "c++"):
        yield ok("compiler", "C++ compiler", found)
    else:
        yield note(
            "compiler.missing", "C++ compiler", "none on the PATH", "only --enable-graph on cpu needs it",
            "install g++ for that",
        )  # fmt: skip


def examine_address(machine: Machine, settings: Settings) -> Iterator[Finding]:
    service = settings.service
    addresses = [(service.admin_host, service.admin_port, "--admin-host, --admin-port")]
    if not service.uds:
        addresses.insert(0, (service.host, service.port, "--host, --port"))
    for host, port, flags in addresses:
        if port == 0:
            continue
        what = f"address {host}:{port}"
        if reason := machine.address_error(host, port):
            yield problem("address.taken", what, reason, "the server cannot listen there", f"choose others: {flags}")
        else:
            yield ok("address", what, "is free")
