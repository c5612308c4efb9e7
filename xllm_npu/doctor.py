"""What `xllm-npu doctor` looks at: can this machine serve, and what would make it better.

Each finding says what was looked at, what was found, and what to do. Asks the platforms' probes and the installed
distributions' versions; loads no model and starts no device.
"""

from __future__ import annotations

import os
import platform as host
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from xllm_npu.config.settings import Settings
from xllm_npu.version import __version__

PACKAGES = ("torch", "transformers", "numba", "fastapi", "uvicorn", "pyzmq")
VENDOR_PACKAGES = ("torch-npu", "triton-ascend", "triton", "cuda-bindings", "modelscope")
LITTLE_MEMORY = 2**30  # the default model with its KV cache and the libraries


@dataclass(frozen=True, slots=True)
class Finding:
    mark: str  # ok | note (serving works, something could be better) | problem (it does not)
    what: str
    found: str
    todo: str = ""

    def text(self) -> str:
        line = f"{self.mark:<8}{self.what}: {self.found}"
        return f"{line}\n{'':<8}-> {self.todo}" if self.todo else line


def examine(settings: Settings) -> list[Finding]:
    return [
        *_versions(),
        *_platforms(settings.execution.platform),
        *_memory(),
        *_model(settings),
        *_compiler(),
        *_address(settings),
    ]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("ok", "system", f"{host.system()} {host.machine()}, {cores} usable cores")
    yield Finding("ok", "xllm-npu", f"{__version__}, Python {host.python_version()}")
    found = {package: installed(package) for package in (*PACKAGES, *VENDOR_PACKAGES)}
    yield Finding("ok", "packages", ", ".join(f"{name} {have}" for name, have in found.items() if have))
    if missing := [name for name in PACKAGES if not found[name]]:
        yield Finding(
            "problem", "packages", f"{', '.join(missing)} not installed", "install xllm-npu with pip: it names them"
        )
    if found["triton"] and found["triton-ascend"]:
        yield Finding(
            "note", "triton", "triton and triton-ascend are both installed, into the same folder",
            "uninstall both, then install the one for this device ([npu] or [cuda])",
        )  # fmt: skip


def _platforms(wanted: str) -> Iterator[Finding]:
    from xllm_platform.registry import probe_all

    found = probe_all()
    for name, availability in found.items():
        if availability.ok:
            yield Finding("ok", f"platform {name}", availability.reason or "can be used")
        else:
            yield Finding("problem" if name == wanted else "note", f"platform {name}", availability.reason)
    if wanted != "auto" and wanted not in found:
        yield Finding("problem", f"platform {wanted}", "there is none of that name", f"use {', '.join(found)} or auto")
    elif not any(availability.ok for availability in found.values()):
        yield Finding("problem", "platforms", "none can be used", "see the reasons above")


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"
    if memory.available < LITTLE_MEMORY:
        yield Finding("note", "memory", text, "end other programs, or choose a smaller model or --max-cache-size")
    else:
        yield Finding("ok", "memory", text)


def _model(settings: Settings) -> Iterator[Finding]:
    from xllm_models import hub

    model = settings.model.model
    if Path(model).expanduser().exists():
        yield Finding("ok", f"model {model}", "is here")
    elif pulled := [entry for entry in hub.list_pulled(settings.model.download_dir) if entry.name == model]:
        yield Finding("ok", f"model {model}", f"{pulled[0].path} ({pulled[0].bytes / 2**20:,.0f} MiB)")
    else:
        yield Finding("note", f"model {model}", "is not here yet", f"`serve` gets it; or now: xllm-npu pull {model}")


def _compiler() -> Iterator[Finding]:
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if found:
        yield Finding("ok", "C++ compiler", found)
    else:
        yield Finding(
            "note", "C++ compiler", "none on the PATH; only --enable-graph on cpu needs it", "install g++ for that"
        )


def _address(settings: Settings) -> Iterator[Finding]:
    service = settings.service
    if service.uds or service.port == 0:
        return
    try:
        family, kind, proto, _, address = socket.getaddrinfo(service.host, service.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding("note", f"address {service.host}:{service.port}", reason, "choose others: --host, --port")
    else:
        yield Finding("ok", f"address {service.host}:{service.port}", "is free")
