"""What every `VirtualMemoryDriver` promises, as checks that a test file for a platform calls.

Each takes a platform whose device is selected. `WRONG` is what every driver refuses: a call on a driver that has four
granules reserved at `start` and `page` mapped as the first and the third.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from xllm_platform.base import OutOfMemoryError, Platform, PlatformError, VirtualMemoryDriver

WRONG: dict[str, Callable[[VirtualMemoryDriver, int, int], object]] = {
    "mapped already": lambda d, start, page: d.map(start, page),
    "not reserved": lambda d, start, page: d.map(start + 4 * d.granularity, page),
    "between granules": lambda d, start, page: d.map(start + d.granularity // 2, page),
    "no page": lambda d, start, page: d.map(start + d.granularity, page + 1),
    "not mapped": lambda d, start, page: d.unmap(start + d.granularity),
    "half a granule": lambda d, start, page: d.create_page(d.granularity // 2),
    "an empty range": lambda d, start, page: d.reserve(0),
    "no range": lambda d, start, page: d.free_range(start + d.granularity),
    "a range in use": lambda d, start, page: d.free_range(start),
    "no page to release": lambda d, start, page: d.release_page(page + 1),
}


@contextlib.contextmanager
def mapped_twice(platform: Platform) -> Iterator[tuple[VirtualMemoryDriver, int, int]]:
    """(driver, address of four granules, a page that is mapped as the first and the third)"""
    driver = platform.virtual_memory()
    size = driver.granularity
    start, page = driver.reserve(4 * size), driver.create_page(size)
    for i in (0, 2):
        driver.map(start + i * size, page)
    yield driver, start, page
    for i in (0, 2):
        driver.unmap(start + i * size)
    driver.release_page(page)
    driver.free_range(start)


def check_two_addresses_show_one_page(platform: Platform) -> None:
    with mapped_twice(platform) as (driver, start, _):
        size = driver.granularity
        first, other = (driver.view(start + i * size, (2, size // 8), torch.float32) for i in (0, 2))
        assert first.device == other.device == platform.device()
        assert first.is_contiguous()
        first.fill_(3)
        first[1, 0] = 5
        platform.synchronize()
        assert torch.equal(first.cpu(), other.cpu())
        assert other[1, 0].item() == 5
        del first
        assert other[0, 0].item() == 3, "a view owned the memory"


def check_dtypes(platform: Platform) -> None:
    with mapped_twice(platform) as (driver, start, _):
        for name in (*platform.capabilities.dtypes, "uint8", "int64"):
            view = driver.view(start, (2, 3, 4), getattr(torch, name))
            view.copy_(torch.arange(24).view(2, 3, 4))
            assert view.cpu().tolist() == torch.arange(24, dtype=view.dtype).view(2, 3, 4).tolist()


def check_a_page_moves_between_addresses(platform: Platform) -> None:
    driver = platform.virtual_memory()
    size = driver.granularity
    start, pages = driver.reserve(2 * size), [driver.create_page(size) for _ in "ab"]
    view = driver.view(start, (2, size // 4), torch.int32)  # made while nothing is mapped
    for i in (0, 1):
        driver.map(start + i * size, pages[i])
        view[i].fill_(i + 1)
    platform.synchronize()
    for i in (0, 1):
        driver.unmap(start + i * size)
    for i in (0, 1):
        driver.map(start + i * size, pages[1 - i])
    assert [view[i, -1].item() for i in (0, 1)] == [2, 1]
    for i in (0, 1):
        driver.unmap(start + i * size)
    for page in pages:
        driver.release_page(page)
    driver.free_range(start)


def check_new_pages(platform: Platform) -> None:
    """Where a driver says that new pages are zero they are, also those whose memory was used before."""
    driver = platform.virtual_memory()
    size = driver.granularity
    start = driver.reserve(size)
    for _ in range(2):
        page = driver.create_page(size)
        driver.map(start, page)
        view = driver.view(start, (size // 4,), torch.int32)
        assert not driver.new_pages_are_zero or not view.any().item()
        view.fill_(-1)
        platform.synchronize()
        driver.unmap(start)
        driver.release_page(page)
    driver.free_range(start)


def check_memory_comes_and_goes(platform: Platform, free_bytes: Callable[[], int], size: int, slack: int) -> None:
    """`free_bytes` falls by `size` with the page and rises with its release; reserving takes nothing."""
    driver = platform.virtual_memory()
    assert size % driver.granularity == 0
    before = free_bytes()
    start = driver.reserve(64 * size)
    assert abs(free_bytes() - before) <= slack
    page = driver.create_page(size)
    driver.map(start + 5 * size, page)
    assert abs(before - size - free_bytes()) <= slack
    driver.unmap(start + 5 * size)
    assert abs(before - size - free_bytes()) <= slack, "unmapping alone keeps the page"
    driver.release_page(page)
    assert abs(free_bytes() - before) <= slack
    driver.free_range(start)


def check_no_memory_left(platform: Platform) -> None:
    driver = platform.virtual_memory()
    size = platform.memory_info().total // driver.granularity * driver.granularity
    with pytest.raises(OutOfMemoryError):
        driver.create_page(size)


# Takes pages from standard input and a socket: "import SIZE NUMBER" (or a descriptor by the socket), "read", "release".
IMPORTER = """
import array, os, socket, sys
import torch
from xllm_platform import registry
platform = registry.select(sys.argv[1])
platform.set_device(0)
driver, way = platform.virtual_memory(), socket.socket(fileno=int(sys.argv[2]))
page = start = view = None
print('>', driver.importer, flush=True)
for line in sys.stdin:
    word, *numbers = line.split()
    try:
        if word == "import":
            size, number = map(int, numbers)
            if platform.capabilities.shared_pages == "descriptor":
                _, [(_, _, data)], _, _ = way.recvmsg(1, socket.CMSG_SPACE(4))
                number = array.array("i", data)[0]
            page, start = driver.import_page(number, size), driver.reserve(size)
            if platform.capabilities.shared_pages == "descriptor":
                os.close(number)
            driver.map(start, page)
            view = driver.view(start, (size // 4,), torch.int32)
            print("> done", flush=True)
        elif word == "read":
            print('>', *view[:3].tolist(), view[-1].item(), flush=True)
        elif word == "export":
            driver.export_page(page, 1)
        else:
            driver.unmap(start)
            driver.release_page(page)
            driver.free_range(start)
            print("> done", flush=True)
    except Exception as error:
        print('>', type(error).__name__, error, flush=True)
"""


class Importer:
    """Another process that imports one page at a time."""

    def __init__(self, platform: Platform) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._way, self._platform = ours, platform
        self._process = subprocess.Popen(
            [sys.executable, "-c", IMPORTER, platform.name, str(theirs.fileno())], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment, pass_fds=(theirs.fileno(),))
        theirs.close()
        self.number = int(self._heard())

    def _heard(self) -> str:
        assert self._process.stdout is not None
        answers = (line for line in self._process.stdout if line.startswith(">"))  # libraries talk too
        return next(answers, "> nothing: it has ended").removeprefix(">").strip()

    def ask(self, order: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._heard()

    def take(self, exported: int, size: int) -> str:
        if self._platform.capabilities.shared_pages == "descriptor":
            socket.send_fds(self._way, [b"p"], [exported])
            os.close(exported)
        return self.ask(f"import {size} {exported}")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._way.close()


@contextlib.contextmanager
def importers(platform: Platform, count: int) -> Iterator[list[Importer]]:
    started = [Importer(platform) for _ in range(count)]
    try:
        yield started
    finally:
        for importer in started:
            importer.end()


@contextlib.contextmanager
def exporter(platform: Platform) -> Iterator[tuple[VirtualMemoryDriver, int, int, torch.Tensor]]:
    """(driver, a page that is mapped, its address, a view over it with the numbers from 0 on)"""
    driver = platform.virtual_memory()
    size = driver.granularity
    start, page = driver.reserve(size), driver.create_page(size)
    driver.map(start, page)
    view = driver.view(start, (size // 4,), torch.int32)
    view.copy_(torch.arange(size // 4))
    platform.synchronize()
    yield driver, page, start, view


def check_a_page_is_shared(platform: Platform) -> None:
    """Two processes see what the one that exports it writes, before and after."""
    with exporter(platform) as (driver, page, start, view), importers(platform, 2) as both:
        size = driver.granularity
        for importer in both:
            assert importer.take(driver.export_page(page, importer.number), size) == "done"
            assert importer.ask("read") == f"0 1 2 {size // 4 - 1}"
        view.fill_(7)
        platform.synchronize()
        assert [importer.ask("read") for importer in both] == ["7 7 7 7"] * 2
        assert "PlatformError" in both[0].ask("export"), "it is another's"
        assert both[0].ask("release") == "done"
        assert both[1].ask("read") == "7 7 7 7"
        assert both[1].ask("release") == "done"
        assert view[-1].item() == 7, "the importers took it along"
        driver.unmap(start)
        driver.release_page(page)
        driver.free_range(start)


def check_a_shared_page_outlives_its_exporter(platform: Platform) -> None:
    with exporter(platform) as (driver, page, start, _), importers(platform, 1) as (importer,):
        size = driver.granularity
        assert importer.take(driver.export_page(page, importer.number), size) == "done"
        driver.unmap(start)
        driver.release_page(page)
        taken = []
        for _ in range(3):  # what comes next gets other memory
            taken.append(driver.create_page(size))
            driver.map(start, taken[-1])
            driver.view(start, (size // 4,), torch.int32).fill_(-1)
            platform.synchronize()
            driver.unmap(start)
        assert importer.ask("read") == f"0 1 2 {size // 4 - 1}"
        assert importer.ask("release") == "done"
        for other in taken:
            driver.release_page(other)
        driver.free_range(start)


def check_refused(platform: Platform, what: str) -> None:
    with mapped_twice(platform) as (driver, start, page), pytest.raises(PlatformError):
        WRONG[what](driver, start, page)


def page_file_bytes() -> int:
    """Committed bytes of the files that the CPU's pages of this process are pieces of."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "xllm-npu-pages" in os.readlink(f"/proc/self/fd/{fd}"):
                total += os.stat(f"/proc/self/fd/{fd}").st_blocks * 512
        except FileNotFoundError:
            pass
    return total
