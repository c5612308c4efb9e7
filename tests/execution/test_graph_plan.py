"""Arithmetic over what graphs take: bytes, streams, and which batch sizes remain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from xllm_models.attention.npu_attention import NpuAttention
from xllm_models.attention.torch_attention import TorchAttention
from xllm_platform.base import MemoryInfo

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.graph_plan import STREAMS_KEPT, GraphCost, GraphCosts, GraphSizes, fitting, measure
from xllm_npu.execution.load_plan import StepShape, graph_sizes, prefill_graph_sizes
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


def nothing(*_: GraphSizes) -> None:
    pass


DECODES = GraphSizes(SIZES)


def test_the_largest_pays_for_what_all_share() -> None:
    device, captured = Device([900, 600, 590], [2000, 1990, 1987]), []
    costs = measure(device, captured.append, lambda: device.log.append("release"), DECODES)  # type: ignore[arg-type]
    assert captured == [GraphSizes([64]), GraphSizes([56])]
    assert costs.decode == GraphCost(300, 10, 3, 2000)
    assert [costs.decode.bytes(n) for n in (0, 1, 2, 11)] == [0, 300, 310, 400]
    assert device.log[-2:] == ["release", "empty cache"]


def test_prompts_are_measured_first_as_they_are_captured_first() -> None:
    device, captured = Device([900, 500, 480, 470, 465], [2000, 1950, 1910, 1907, 1904]), []
    wanted = GraphSizes(SIZES, [64, 128, 256])
    costs = measure(device, captured.append, lambda: None, wanted)  # type: ignore[arg-type]
    assert captured == [GraphSizes(prefill=[256]), GraphSizes(prefill=[128]), GraphSizes([64]), GraphSizes([56])]
    assert costs.prefill == GraphCost(400, 20, 40, 2000)
    assert costs.decode == GraphCost(10, 5, 3, 2000)
    assert costs.choose(wanted, costs.counts(wanted)) == (wanted, 10 + 10 * 5 + 400 + 2 * 20)


def test_one_size_and_no_limit() -> None:
    device = Device([900, 600], [None, None])
    costs = measure(device, nothing, nothing, GraphSizes([4]))  # type: ignore[arg-type]
    assert costs.decode == GraphCost(300, 300, 0, None)
    assert costs.counts(GraphSizes([1] * 1000, [64] * 9)) == (1000, 9)


def test_memory_that_others_give_back_meanwhile_is_no_gain() -> None:
    costs = measure(Device([500, 600, 650], [9, 9, 9]), nothing, nothing, DECODES)  # type: ignore[arg-type]
    assert costs.decode.bytes(11) == 0


PROMPTS = [64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize(("left", "decodes", "prompts"), [
    (STREAMS_KEPT + 11 * 2 + 6 * 33, 11, 6), (STREAMS_KEPT + 11 * 2 + 6 * 33 - 1, 11, 5),
    (STREAMS_KEPT + 11 * 2 + 33, 11, 1), (STREAMS_KEPT + 11 * 2 + 32, 11, 0), (STREAMS_KEPT + 9, 4, 0)])
def test_prompts_get_the_streams_that_decodes_leave(left: int, decodes: int, prompts: int) -> None:
    """32 layers: 33 graphs a size."""
    costs = GraphCosts(GraphCost(further_streams=2, streams_left=left), GraphCost(further_streams=33,
                                                                                 streams_left=left))
    assert costs.counts(GraphSizes(SIZES, PROMPTS)) == (decodes, prompts)


def test_sizes_of_prompts_are_trimmed_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    left = STREAMS_KEPT + 11 * 2 + 3 * 33
    costs = GraphCosts(GraphCost(first_bytes=7, further_streams=2, streams_left=left),
                       GraphCost(100, 30, 33, left))
    wanted = GraphSizes(SIZES, PROMPTS)
    kept, taken = costs.choose(wanted, costs.counts(wanted))
    assert kept == GraphSizes(SIZES, [64, 512, 2048])
    assert taken == 7 + 100 + 2 * 30
    assert caplog.messages == [f"the device's streams ({STREAMS_KEPT + 99} left, 33 each) allow 3 of 6 rows of graphs "
                               "for prompts: numbers of tokens 64, 512, 2048 are captured"]


def test_no_size_of_prompts_fits() -> None:
    left, wanted = STREAMS_KEPT + 11 * 2 + 32, GraphSizes(SIZES, PROMPTS)
    costs = GraphCosts(GraphCost(further_streams=2, streams_left=left), GraphCost(100, 30, 33, left))
    with pytest.raises(LoadError, match=r"has 280 streams left.*248 are kept.*one takes 33: turn "
                                        r"enable_prefill_piecewise_graph off, or capture fewer"):
        costs.choose(wanted, costs.counts(wanted))


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


@pytest.mark.parametrize(("max_tokens", "limit", "sizes"), [
    (8192, 2048, [64, 128, 256, 512, 1024, 2048]), (1000, 2048, [64, 128, 256, 512, 1000]), (64, 2048, [64]),
    (8192, 65, [64, 65]), (24, 2048, [24]), (8192, 100, [64, 100])])
def test_sizes_of_prompts(max_tokens: int, limit: int, sizes: list[int]) -> None:
    assert prompt_sizes("capture", max_tokens, max_tokens_for_graph_mode=limit) == sizes
    assert prompt_sizes("capture", max_tokens, enable_prefill_piecewise_graph=False) == []


def test_pieces_need_graphs_that_are_captured() -> None:
    with pytest.raises(LoadError, match=r"Platform x compiles decode steps.*turn enable_prefill_piecewise_graph off"):
        prompt_sizes("compile", 64)
    with pytest.raises(LoadError, match=r"adds to the graphs of enable_graph: turn that on too"):
        prompt_sizes("capture", 64, enable_graph=False)


def prompt_sizes(graph: str, max_tokens: int, **options: object) -> list[int]:
    platform = SimpleNamespace(name="x", capabilities=SimpleNamespace(graph=graph))
    on = {"enable_graph": True, "enable_prefill_piecewise_graph": True, **options}
    settings = settings_from_kwargs(model="m", **on)  # type: ignore[arg-type]
    return prefill_graph_sizes(settings, platform, StepShape(128, 6, max_tokens, 16))  # type: ignore[arg-type]
