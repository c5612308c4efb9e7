"""Control-group limits, read from trees made on disk in the shapes the kernel and container runtimes make."""

from __future__ import annotations

from pathlib import Path

import pytest
from xllm_platform.cpu import cgroup
from xllm_platform.cpu.cgroup import CgroupFiles, MemoryLimit

GIB = 1 << 30


class Tree:
    """A fake /sys/fs/cgroup with the two files of /proc that point into it."""

    def __init__(self, root: Path) -> None:
        self.mount = root / "cgroup"
        self.mount.mkdir()
        self.files = CgroupFiles(cgroup=root / "self_cgroup", mounts=root / "mounts")

    def mounted(self, line: str, own: str) -> None:
        self.files.mounts.write_text(line.format(mount=self.mount) + "\n")
        self.files.cgroup.write_text(own + "\n")

    def v1(self, controller: str, own: str) -> None:
        self.mounted(f"cgroup {{mount}} cgroup rw,relatime,{controller} 0 0", f"4:{controller}:{own}")

    def v2(self, own: str) -> None:
        self.mounted("cgroup2 {mount} cgroup2 rw,nosuid 0 0", f"0::{own}")
        (self.mount / "cgroup.controllers").write_text("cpu memory")

    def group(self, path: str, **values: str) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name.replace("__", ".")).write_text(value + "\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_v2_leaves_out_reclaimable_cache(tree: Tree) -> None:
    tree.v2("/box")
    tree.group(
        "box",
        memory__max=str(4 * GIB),
        memory__current=str(3 * GIB),
        memory__stat=f"anon 5\ninactive_file {GIB}\nactive_file 7",
    )
    assert cgroup.memory_limit(tree.files) == MemoryLimit(limit=4 * GIB, used=2 * GIB)


def test_v2_takes_the_ancestor_that_leaves_least(tree: Tree) -> None:
    tree.v2("/pod/box")
    tree.group("pod", memory__max=str(8 * GIB), memory__current=str(7 * GIB))
    tree.group("pod/box", memory__max=str(4 * GIB), memory__current=str(GIB))
    assert cgroup.memory_limit(tree.files) == MemoryLimit(limit=8 * GIB, used=7 * GIB)


def test_v2_without_limit(tree: Tree) -> None:
    tree.v2("/box")
    tree.group("box", memory__max="max", memory__current=str(GIB), cpu__max="max 100000")
    assert cgroup.memory_limit(tree.files) is None
    assert cgroup.cpu_quota(tree.files) is None


def test_v1(tree: Tree) -> None:
    tree.v1("memory", "/docker/abc")
    tree.group(
        "docker/abc",
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
    )
    assert cgroup.memory_limit(tree.files) == MemoryLimit(limit=2 * GIB, used=GIB // 2)


def test_v1_writes_no_limit_as_a_huge_number(tree: Tree) -> None:
    tree.v1("memory", "/")
    tree.group("", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes=str(GIB))
    assert cgroup.memory_limit(tree.files) is None


@pytest.mark.parametrize("own", ["/docker/abc", "/../../outside"])
def test_container_that_sees_its_own_group_as_the_root(tree: Tree, own: str) -> None:
    tree.v1("memory", own)
    tree.group("", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes="0")
    assert cgroup.memory_limit(tree.files) == MemoryLimit(limit=GIB, used=0)


def test_cpu_quota_v1_and_v2(tree: Tree) -> None:
    tree.v1("cpu", "/box")
    tree.group("box", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert cgroup.cpu_quota(tree.files) == 1.5
    tree.group("box", cpu__cfs_quota_us="-1")
    assert cgroup.cpu_quota(tree.files) is None
    tree.v2("/box")
    tree.group("box", cpu__max="400000 100000")
    assert cgroup.cpu_quota(tree.files) == 4


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    nowhere = CgroupFiles(cgroup=tmp_path / "none", mounts=tmp_path / "none")
    assert cgroup.memory_limit(nowhere) is None
    assert cgroup.cpu_quota(nowhere) is None
