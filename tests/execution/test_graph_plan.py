"""Arithmetic over what graphs take: bytes, streams, and which batch sizes remain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from xllm_models.attention.npu_attention import NpuAttention
from xllm_models.attention.torch_attention import TorchAttention
from xllm_platform.base import MemoryInfo

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.graph_plan import STREAMS_KEPT, GraphCost, fitting, measure
from xllm_npu.execution.load_plan import StepShape, graph_sizes
from xllm_npu.execution.model_loader import LoadError

SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


class Device:
    """Gives graphs memory and streams, takes nothing back."""

    def __init__(self, free: list[int], streams: list[int | None]) -> None:
        self._free, self._streams = iter(free), iter(streams)
        self.log: list[str] = []

    def graph_backend(self) -> Device:
        return self

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(next(self._free), 1000)

    def streams_left(self) -> int | None:
        return next(self._streams)

    def empty_cache(self) -> None:
        self.log.append("empty cache")


def nothing(*_: list[int]) -> None:
    pass


def test_the_largest_pays_for_what_all_share() -> None:
    device, captured = Device([900, 600, 590], [2000, 1990, 1987]), []
    cost = measure(device, captured.append, lambda: device.log.append("release"), SIZES)  # type: ignore[arg-type]
    assert captured == [[64], [56]]
    assert cost == GraphCost(300, 10, 3, 2000)
    assert [cost.bytes(n) for n in (0, 1, 2, 11)] == [0, 300, 310, 400]
    assert device.log[-2:] == ["release", "empty cache"]


def test_one_size_and_no_limit() -> None:
    cost = measure(Device([900, 600], [None, None]), nothing, nothing, [4])  # type: ignore[arg-type]
    assert cost == GraphCost(300, 300, 0, None)
    assert cost.most_graphs(1000) == 1000


def test_memory_that_others_give_back_meanwhile_is_no_gain() -> None:
    cost = measure(Device([500, 600, 650], [9, 9, 9]), nothing, nothing, SIZES)  # type: ignore[arg-type]
    assert cost.bytes(11) == 0


@pytest.mark.parametrize(("left", "each", "most"), [
    (STREAMS_KEPT + 11, 1, 11), (STREAMS_KEPT + 10, 1, 10), (STREAMS_KEPT + 33, 3, 11), (STREAMS_KEPT + 32, 3, 10),
    (STREAMS_KEPT + 2, 3, 0), (10, 1, 0), (STREAMS_KEPT + 5, 0, 5)])
def test_streams_bound_the_number(left: int, each: int, most: int) -> None:
    assert GraphCost(further_streams=each, streams_left=left).most_graphs(len(SIZES)) == most


def test_the_largest_and_the_smallest_stay(caplog: pytest.LogCaptureFixture) -> None:
    cost = GraphCost(further_streams=3, streams_left=2000)
    for count in range(2, len(SIZES)):
        kept = fitting(SIZES, count, cost)
        assert len(kept) == count
        assert (kept[0], kept[-1]) == (1, 64)
        assert set(kept) <= set(SIZES)
    assert fitting(SIZES, 1, cost) == [64]
    assert len(caplog.messages) == len(SIZES) - 1


def test_all_fit(caplog: pytest.LogCaptureFixture) -> None:
    assert fitting(SIZES, len(SIZES), GraphCost()) == SIZES
    assert not caplog.messages


def test_none_fits() -> None:
    with pytest.raises(LoadError, match=r"has 40 streams left.*turn enable_graph off"):
        fitting(SIZES, 0, GraphCost(further_streams=3, streams_left=40))


def sizes_for(backend: type, tasks: object) -> list[int]:
    capabilities = SimpleNamespace(graph="capture", default_graph_sizes=(1, 2, 4, 8))
    platform = SimpleNamespace(name="x", capabilities=capabilities, graph_backend=lambda: SimpleNamespace(tasks=tasks))
    settings = settings_from_kwargs(model="m", enable_graph=True)
    return graph_sizes(settings, platform, backend, StepShape(128, 6, 64, 16))  # type: ignore[arg-type]


def test_lengths_told_by_the_host_need_a_platform_that_takes_them() -> None:
    assert sizes_for(NpuAttention, object()) == [1, 2, 4, 6]
    with pytest.raises(LoadError, match=r"NpuAttention is told lengths by the host.*turn enable_graph off"):
        sizes_for(NpuAttention, None)
    with pytest.raises(LoadError, match="TorchAttention reads lengths on the host"):
        sizes_for(TorchAttention, object())
