"""The machine as the checks see it: files, environment, programs' output, installed distributions, network.

`Machine` is the whole interface, so a test can be any machine. `ThisMachine` reads the real one; it never raises for
what is missing or forbidden, and starts a program only in `run`.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

RUN_SECONDS = 30.0  # npu-smi takes up to ten on a server with 16 chips


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said. `code` None: it had not ended after RUN_SECONDS."""

    code: int | None
    text: str  # stdout, then stderr


class Machine(Protocol):
    @property
    def environment(self) -> Mapping[str, str]: ...

    def system(self) -> str:
        """Name and architecture, e.g. `Linux aarch64`."""

    def python(self) -> str: ...

    def user(self) -> str: ...

    def cores(self) -> int:
        """CPU cores that this process may use."""

    def memory(self) -> tuple[int, int]:
        """Bytes of host memory: available, total."""

    def open_files(self) -> int:
        """How many files and sockets a process may have open."""

    def read(self, path: str) -> str | None:
        """A text file's content; None if it cannot be read."""

    def exists(self, path: str) -> bool: ...

    def matches(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern, in order."""

    def may_use(self, path: str) -> bool:
        """Whether this user may read and write the file or device node."""

    def capacity(self, path: str) -> int | None:
        """Bytes of the file system that holds `path`."""

    def installed(self, distribution: str) -> str | None:
        """The installed version."""

    def package_folder(self, package: str) -> str | None:
        """Where `import package` would find it; imports nothing."""

    def program(self, *names: str) -> str | None:
        """Path of the first of these programs that is on the PATH."""

    def run(self, *command: str) -> Answer | None:
        """The program's answer; None if there is no such program."""

    def interfaces(self) -> dict[str, tuple[str, ...]]:
        """Network interfaces that are up, with their IP addresses."""

    def address_error(self, host: str, port: int) -> str:
        """Why a server cannot listen there; empty if it can."""


class ThisMachine:
    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    def system(self) -> str:
        return f"{platform.system()} {platform.machine()}"

    def python(self) -> str:
        return platform.python_version()

    def user(self) -> str:
        import pwd

        try:
            return pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return f"user {os.geteuid()}"

    def cores(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def memory(self) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def open_files(self) -> int:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return soft if soft != resource.RLIM_INFINITY else 2**31

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text("utf-8", errors="replace")
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def matches(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def may_use(self, path: str) -> bool:
        return os.access(path, os.R_OK | os.W_OK)

    def capacity(self, path: str) -> int | None:
        try:
            return shutil.disk_usage(path).total
        except OSError:
            return None

    def installed(self, distribution: str) -> str | None:
        try:
            return version(distribution)
        except PackageNotFoundError:
            return None

    def package_folder(self, package: str) -> str | None:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return None
        places = spec.submodule_search_locations if spec else None
        return next(iter(places), None) if places else None

    def program(self, *names: str) -> str | None:
        return next((path for name in names if (path := shutil.which(name))), None)

    def run(self, *command: str) -> Answer | None:
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=RUN_SECONDS, text=True,
                errors="replace", check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Answer(None, "")
        except OSError as error:
            return Answer(126, str(error))
        return Answer(done.returncode, done.stdout + done.stderr)

    def interfaces(self) -> dict[str, tuple[str, ...]]:
        import psutil

        families = (socket.AF_INET, socket.AF_INET6)
        try:
            up, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
        except OSError:  # a sandbox
            return {}
        return {
            name: tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families)
            for name, entries in addresses.items()
            if name not in up or up[name].isup
        }

    def address_error(self, host: str, port: int) -> str:
        try:
            family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            return error.strerror or str(error)
        return ""
