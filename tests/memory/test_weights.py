"""Weights over pages of the CPU's virtual memory: where they lie, what becomes of their contents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from xllm_models.weight_memory import ALIGNMENT, WeightLayout, allocating_in, empty_weight, weights_stay
from xllm_platform.base import PlatformError
from xllm_platform.cpu.virtual_memory import MemfdVirtualMemory

from tests.support.book_driver import GRANULE, BookDriver, fail_nth
from tests.support.memory_driver_contract import page_file_bytes
from xllm_npu.memory import weight_contents
from xllm_npu.memory.physical_pages import PhysicalPagePool
from xllm_npu.memory.weight_contents import (
    CheckpointFiles,
    HostCopy,
    HostMemoryShort,
    WeightsChanged,
    on_its_own_thread,
)
from xllm_npu.memory.weight_regions import WeightRegion

CPU = torch.device("cpu")
SHAPES = [((3, 100), torch.float32), ((7,), torch.bfloat16), ((0, 5), torch.float32), ((5, 3, 11), torch.uint8),
          ((4000,), torch.float32)]


def planned() -> WeightLayout:
    layout = WeightLayout()
    with allocating_in(layout):
        assert all(empty_weight(shape, dtype, CPU).is_meta for shape, dtype in SHAPES)
    return layout


class Weights:
    """All of SHAPES over pages that are no neighbours, filled."""

    def __init__(self) -> None:
        self.pool = PhysicalPagePool(MemfdVirtualMemory(lambda: 1 << 40), GRANULE, 64, elastic=True)
        self.region = WeightRegion(self.pool, planned())
        pages = self.pool.take(20)
        self.pool.give(pages[::2])
        self.map()
        with allocating_in(self.region):
            self.tensors = [empty_weight(shape, dtype, CPU) for shape, dtype in SHAPES]
        self.other_pages = pages[1::2]
        self.fill()

    def map(self) -> None:
        self.region.map(list(reversed(self.pool.take(self.region.num_pages))))

    def unmap(self) -> None:
        self.pool.give(self.region.unmap())

    def fill(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            tensor.copy_(torch.randint(0, 200, tensor.shape, generator=generator))

    def values(self) -> list[list]:
        return [tensor.tolist() for tensor in self.tensors]


@pytest.fixture
def weights() -> Iterator[Weights]:
    made = Weights()
    yield made
    made.pool.give([*made.region.close(), *made.other_pages])
    made.pool.close()


def test_rule_61_weights_lie_one_after_the_other_in_fragmented_pages(weights):
    places = [tensor.data_ptr() - weights.region.address for tensor in weights.tensors if tensor.numel()]
    assert all(place % ALIGNMENT == 0 for place in places)
    assert places == sorted(places)
    pages = weights.region.pages()
    assert [b - a for a, b in pairwise(pages)] != [1] * (len(pages) - 1), "the test wants them apart"
    assert weights.region.complete
    assert all(weights.region.contains(tensor) for tensor in weights.tensors)
    assert not weights.region.contains(torch.zeros(3))
    weights.region.check_integrity()
    before = weights.values()
    weights.tensors[0].fill_(3)
    assert weights.values()[1:] == before[1:], "weights overlap"


def test_addresses_stay_and_memory_goes(weights):
    taken, addresses = page_file_bytes(), [tensor.data_ptr() for tensor in weights.tensors]
    weights.unmap()
    assert page_file_bytes() == taken - weights.region.num_pages * GRANULE
    assert not weights.region.is_mapped
    weights.map()
    assert not any(tensor.any() for tensor in weights.tensors), "new pages are zero"
    weights.fill()
    assert [tensor.data_ptr() for tensor in weights.tensors] == addresses


def test_allocation_out_of_order_is_noticed(weights):
    region = WeightRegion(weights.pool, planned())
    with pytest.raises(AssertionError, match="another order"):
        region.empty((3, 99), torch.float32, CPU)
    region.close()


def test_the_hash_is_of_the_weights_alone(weights, monkeypatch):
    before = weights.region.content_hash()
    gap = weights.region.layout.extents[0][1]
    weights.region._region.view(gap, (1,), torch.uint8).fill_(9)
    assert weights.region.content_hash() == before
    monkeypatch.setattr("xllm_npu.memory.weight_regions.CHUNK_BYTES", 1000)
    assert weights.region.content_hash() == before, "pieces make no difference"
    weights.tensors[-1][-1] += 1
    assert weights.region.content_hash() != before


@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_mapping_that_fails_half_way_is_undone(n):
    driver = BookDriver()
    pool = PhysicalPagePool(driver, GRANULE, 64, elastic=True)
    region = WeightRegion(pool, planned())
    pages = pool.take(region.num_pages)
    assert len(pages) >= 5
    driver.fault = fail_nth("map", n)
    with pytest.raises(PlatformError):
        region.map(pages)
    assert not driver.mapped
    region.map(pages)


def test_a_copy_in_host_memory_comes_back_as_often_as_asked_for(weights, monkeypatch):
    monkeypatch.setattr("xllm_npu.memory.weight_regions.CHUNK_BYTES", 4096)
    before, copy = weights.values(), HostCopy(False, lambda: None, lambda: weights.region.layout.size)
    copy.save(weights.region)
    for _ in range(2):
        weights.unmap()
        weights.map()
        copy.restore(weights.region)
        assert weights.values() == before


def test_a_copy_that_the_host_has_no_room_for_is_refused(weights):
    copy = HostCopy(False, lambda: None, lambda: weights.region.layout.size - 1)
    with pytest.raises(HostMemoryShort, match="sleep at level 2"):
        copy.save(weights.region)


class Files:
    def __init__(self, weights: Weights) -> None:
        self.weights, self.seed, self.missing = weights, 0, False

    def check(self) -> None:
        if self.missing:
            raise FileNotFoundError("model.safetensors")

    def load(self) -> None:
        self.check()
        self.weights.fill(self.seed)


def test_files_give_the_weights_again_and_are_compared(weights):
    files, before = Files(weights), weights.values()
    contents = CheckpointFiles(files, lambda: None, unchanged=True)
    contents.save(weights.region)
    weights.unmap()
    weights.map()
    contents.restore(weights.region)
    assert weights.values() == before
    files.seed = 1
    with pytest.raises(WeightsChanged):
        contents.restore(weights.region)
    anything = CheckpointFiles(files, lambda: None, unchanged=False)
    anything.save(weights.region)
    anything.restore(weights.region)
    assert weights.values() != before
    files.missing = True
    with pytest.raises(FileNotFoundError):
        anything.save(weights.region)


def test_the_hook_is_off_outside():
    assert not weights_stay()
    assert empty_weight((2, 3), torch.float32, CPU).device == CPU
    with allocating_in(WeightLayout()):
        assert weights_stay()
    assert not weights_stay()


def test_work_on_its_own_thread_raises_here():
    threads: list[str] = []
    on_its_own_thread(lambda: threads.append(weight_contents.threading.current_thread().name))
    assert threads == ["weights"]
    with pytest.raises(ZeroDivisionError):
        on_its_own_thread(lambda: 1 / 0)
