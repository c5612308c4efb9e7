"""Virtual memory on a CPU, by what the system says of the process."""

from __future__ import annotations

import os

import psutil
import pytest
from xllm_platform import registry
from xllm_platform.base import OutOfMemoryError, PlatformError
from xllm_platform.cpu.virtual_memory import MemfdVirtualMemory

from tests.support import memory_driver_contract as contract

MIB = 2**20


def test_resident_memory_of_the_process_follows_the_pages() -> None:
    driver = MemfdVirtualMemory(lambda: 2**40)
    process, size, count = psutil.Process(), 2 * MIB, 32
    start = driver.reserve(count * size)
    before = process.memory_info().shared
    pages = [driver.create_page(size) for _ in range(count)]
    for i, page in enumerate(pages):
        driver.map(start + i * size, page)
    assert process.memory_info().shared - before >= count * size, "a mapped page is resident before it is touched"
    for i, page in enumerate(pages):
        driver.unmap(start + i * size)
        driver.release_page(page)
    assert process.memory_info().shared - before < 2 * MIB
    driver.free_range(start)


def test_a_mapped_page_is_not_released() -> None:
    with contract.mapped_twice(registry.select("cpu")) as (driver, _, page), pytest.raises(
            PlatformError, match="mapped 2 times"):
        driver.release_page(page)


def test_a_page_that_reaches_over_another_is_refused() -> None:
    driver = MemfdVirtualMemory(lambda: 2**40)
    size = driver.granularity
    start, small, large = driver.reserve(4 * size), driver.create_page(size), driver.create_page(2 * size)
    driver.map(start + size, small)
    with pytest.raises(PlatformError, match="already"):
        driver.map(start, large)
    driver.unmap(start + size)
    driver.map(start, large)
    with pytest.raises(PlatformError, match="already"):
        driver.map(start + size, small)
    with pytest.raises(PlatformError, match="no reserved range"):
        driver.map(start + 4 * size, large)
    driver.unmap(start)
    for page in (small, large):
        driver.release_page(page)
    driver.free_range(start)


def test_a_page_larger_than_what_is_free_is_refused_before_anything_is_taken() -> None:
    driver = MemfdVirtualMemory(lambda: 4 * MIB)
    before = contract.page_file_bytes()
    with pytest.raises(OutOfMemoryError, match="4194304 bytes are free"):
        driver.create_page(8 * MIB)
    assert contract.page_file_bytes() == before


def test_the_file_does_not_grow_while_pages_come_and_go() -> None:
    driver = MemfdVirtualMemory(lambda: 2**40)
    for _ in range(5):
        pages = [driver.create_page(MIB) for _ in range(3)]
        for page in pages:
            driver.release_page(page)
    assert os.fstat(driver._file).st_size == 3 * MIB


def test_what_is_unmapped_cannot_be_touched() -> None:
    driver = MemfdVirtualMemory(lambda: 2**40)
    size = driver.granularity
    start, page = driver.reserve(2 * size), driver.create_page(size)
    assert access_at(start) == "---p"
    driver.map(start, page)
    assert (access_at(start), access_at(start + size)) == ("rw-s", "---p")
    driver.unmap(start)
    assert access_at(start) == "---p"
    driver.release_page(page)
    driver.free_range(start)
    assert access_at(start) != "---p"


def access_at(address: int) -> str:
    """What the process may do with the page at an address, as /proc/self/maps says it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            where, access, *_ = line.split()
            begin, end = (int(part, 16) for part in where.split("-"))
            if begin <= address < end:
                return access
    return ""


def test_a_shared_page_goes_back_to_the_system_with_the_last_that_has_it() -> None:
    platform = registry.select("cpu")
    with contract.importers(platform, 2) as (first, second):
        driver = platform.virtual_memory()
        assert isinstance(driver, MemfdVirtualMemory)
        size, file = 64 * driver.granularity, driver._file

        def resident() -> int:
            return os.stat(f"/proc/self/fd/{file}").st_blocks * 512

        page = driver.create_page(size)
        for importer in (first, second):
            assert importer.take(driver.export_page(page, importer.number), size) == "done"
        driver.release_page(page)
        assert resident() == size
        assert first.ask("release") == "done"
        assert resident() == size
        assert second.ask("release") == "done"
        assert resident() == 0, "the last punches the hole, though it is not its file"
        assert driver.create_page(size)
        assert os.fstat(file).st_size == size, "the piece is used again"


def test_a_piece_that_a_process_had_when_it_was_killed_is_used_again() -> None:
    platform = registry.select("cpu")
    with contract.importers(platform, 1) as (importer,):
        driver = platform.virtual_memory()
        assert isinstance(driver, MemfdVirtualMemory)
        size, pages = driver.granularity, 4
        made = [driver.create_page(size) for _ in range(pages)]
        assert importer.take(driver.export_page(made[1], importer.number), size) == "done"
        for page in made:
            driver.release_page(page)
        again = [driver.create_page(size) for _ in range(pages)]
        assert os.fstat(driver._file).st_size == (pages + 1) * size, "the importer's piece was given away"
        importer.end()
        for page in again:
            driver.release_page(page)
        for _ in range(pages + 1):
            driver.create_page(size)
        assert os.fstat(driver._file).st_size == (pages + 1) * size


def test_an_imported_page_cannot_be_written() -> None:
    exporter, importer = MemfdVirtualMemory(lambda: 2**40), MemfdVirtualMemory(lambda: 2**40)
    size = exporter.granularity
    descriptor = exporter.export_page(exporter.create_page(size), 0)
    page, start = importer.import_page(descriptor, size), importer.reserve(size)
    os.close(descriptor)
    importer.map(start, page)
    assert access_at(start) == "r--s"
    importer.unmap(start)
    importer.release_page(page)


def test_what_is_no_page_is_not_imported() -> None:
    driver = MemfdVirtualMemory(lambda: 2**40)
    with pytest.raises(PlatformError, match="not that of a page"):
        driver.import_page(0, driver.granularity)
    descriptor = driver.export_page(driver.create_page(driver.granularity), 0)
    with pytest.raises(PlatformError, match="no page of"):
        MemfdVirtualMemory(lambda: 2**40).import_page(descriptor, 2 * driver.granularity)
    os.close(descriptor)
