"""What the control groups of this process allow: memory and processors, for cgroup v1, v2 and hybrid mounts.

A container's limit is the smallest one on the way from the process's own group up to the root of the mount.
Where the path in /proc/self/cgroup is the host's and the container sees its own group as the mount's root,
the root is read. Knows nothing of the machine's own memory; `None` means no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# cgroup v1 writes "no limit" as the largest page-aligned int64; anything near it is no limit.
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes. `used` leaves out file cache that the kernel drops when the group needs memory."""

    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """Where the kernel tells; tests point it elsewhere."""

    cgroup: Path = Path("/proc/self/cgroup")
    mounts: Path = Path("/proc/self/mounts")


def memory_limit(files: CgroupFiles = CgroupFiles()) -> MemoryLimit | None:
    """The limit that leaves the least memory, or None."""
    found = []
    for folder in _folders("memory", files):
        v2 = (folder / "cgroup.controllers").exists() or (folder / "memory.max").exists()
        limit = _read_int(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _read_int(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is None or limit >= NO_LIMIT or used is None:
            continue
        cache = _read_stat(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
        found.append(MemoryLimit(limit, max(0, used - cache)))
    return min(found, key=lambda m: m.limit - m.used, default=None)


def cpu_quota(files: CgroupFiles = CgroupFiles()) -> float | None:
    """Processors' worth of time the process may use, or None."""
    found = []
    for folder in _folders("cpu", files):
        if (folder / "cpu.max").exists():  # v2: "quota period" or "max period"
            words = _read(folder / "cpu.max").split()
            if len(words) == 2 and words[0] != "max":
                found.append(int(words[0]) / int(words[1]))
            continue
        quota, period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


def _folders(controller: str, files: CgroupFiles) -> list[Path]:
    """The group's folder and its ancestors up to the mount, for the hierarchy that has `controller`."""
    paths = {}
    for line in _read(files.cgroup).splitlines():
        number, controllers, path = line.split(":", 2)
        paths.update(
            dict.fromkeys(["v2"] if number == "0" and not controllers else controllers.split(","), path)
        )
    folders: list[Path] = []
    for line in _read(files.mounts).splitlines():
        words = line.split()
        if len(words) < 4 or not words[2].startswith("cgroup"):
            continue
        v2 = words[2] == "cgroup2"
        if not v2 and controller not in words[3].split(","):
            continue
        group = paths.get("v2" if v2 else controller)
        if group is not None:
            folders += _upwards(Path(words[1]), group)
    return folders


def _upwards(mount: Path, path: str) -> list[Path]:
    folder = mount / path.strip("/")
    if ".." in folder.parts or not folder.exists():
        return [mount]
    return [folder, *[parent for parent in folder.parents if parent == mount or mount in parent.parents]]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent or not readable here: no limit is known
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
