"""What every platform plugin promises, run against each one that can be used here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from xllm_platform import registry
from xllm_platform.base import Availability, Capabilities, Cut, Graph, Platform, PlatformError

BUILT_IN = ("cpu", "npu", "cuda")


@pytest.fixture(params=BUILT_IN)
def plugin(request: pytest.FixtureRequest) -> Platform:
    available = registry.probe(request.param)
    if not available.ok:
        pytest.skip(available.reason)
    platform = registry.select(request.param)
    platform.set_device(0)
    return platform


@pytest.mark.parametrize("name", BUILT_IN)
def test_probe_answers_without_raising_and_says_why_not(name: str) -> None:
    available = registry.load(name).probe()
    assert isinstance(available, Availability)
    assert available.ok or len(available.reason) > 10


@pytest.mark.parametrize("name", BUILT_IN)
def test_class_attributes(name: str) -> None:
    plugin = registry.load(name)
    assert plugin.name == name
    assert plugin.device_type == name
    assert plugin.collective_backend in {"gloo", "hccl", "nccl"}


def test_capabilities_are_consistent(plugin: Platform) -> None:
    caps = plugin.capabilities
    assert isinstance(caps, Capabilities)
    assert caps.graph in {"none", "compile", "capture"}
    assert caps.dtypes
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in caps.dtypes)
    assert caps.attention_backends
    assert caps.default_block_size >= 16
    assert caps.default_block_size % 16 == 0
    assert list(caps.default_graph_sizes) == sorted(set(caps.default_graph_sizes))
    assert caps.default_graph_sizes[0] == 1


def test_devices(plugin: Platform) -> None:
    assert plugin.device_count() >= 1
    assert plugin.device().type == plugin.device_type
    assert plugin.device_name().strip()
    for wrong in (-1, plugin.device_count()):
        with pytest.raises(PlatformError, match=str(wrong)):
            plugin.set_device(wrong)


def test_tensors_live_on_the_device(plugin: Platform) -> None:
    x = torch.arange(8, device=plugin.device())
    plugin.synchronize()
    assert (x * 2).sum().item() == 56


def test_memory_info(plugin: Platform) -> None:
    memory = plugin.memory_info()
    assert 0 < memory.free <= memory.total
    assert memory.total > 64 << 20  # bytes, not pages or megabytes


def test_memory_info_follows_allocation(plugin: Platform) -> None:
    size = 1 << 30  # the kernel keeps some hundred MiB of freed pages on per-core lists, not counted as free

    def taken() -> int:
        before = plugin.memory_info().free
        block = torch.ones(size, dtype=torch.uint8, device=plugin.device())  # touched, so resident
        plugin.synchronize()
        during = plugin.memory_info().free
        del block
        plugin.empty_cache()
        return before - during

    # Other processes of the machine may be giving memory back at the same time, but they come to an end.
    assert any(taken() > size // 2 for _ in range(10))


def test_allocator_stats(plugin: Platform) -> None:
    before = plugin.allocator_stats()
    block = torch.ones(32 << 20, dtype=torch.uint8, device=plugin.device())
    during = plugin.allocator_stats()
    assert during.reserved >= during.allocated >= 0
    assert during.peak_reserved >= during.reserved
    if during.allocated:  # this platform has a caching allocator
        assert during.allocated - before.allocated >= 32 << 20
        del block
        gc.collect()
        plugin.empty_cache()
        assert plugin.allocator_stats().reserved <= during.reserved
    else:
        assert during == before


def test_peaks_start_anew(plugin: Platform) -> None:
    plugin.reset_peak_stats()
    before = plugin.allocator_stats()
    assert before.peak_allocated == before.allocated
    block = torch.ones(32 << 20, dtype=torch.uint8, device=plugin.device())
    during = plugin.allocator_stats()
    assert during.peak_allocated >= during.allocated
    del block
    gc.collect()
    after = plugin.allocator_stats()
    assert after.peak_allocated == during.peak_allocated
    plugin.reset_peak_stats()
    assert plugin.allocator_stats().peak_allocated == after.allocated


def test_virtual_memory_is_there_exactly_if_promised(plugin: Platform) -> None:
    if not plugin.capabilities.virtual_memory:
        with pytest.raises(PlatformError, match=r"capabilities\.virtual_memory"):
            plugin.virtual_memory()
        return
    driver = plugin.virtual_memory()
    size = driver.granularity
    start, page = driver.reserve(4 * size), driver.create_page(size)
    for offset in (0, 2 * size):
        driver.map(start + offset, page)
    first, other = (driver.view(start + offset, (size // 4,), torch.int32) for offset in (0, 2 * size))
    first.copy_(torch.arange(size // 4, dtype=torch.int32))
    plugin.synchronize()
    assert torch.equal(other.cpu(), torch.arange(size // 4, dtype=torch.int32))
    with pytest.raises(PlatformError):
        driver.map(start, page)
    for offset in (0, 2 * size):
        driver.unmap(start + offset)
    with pytest.raises(PlatformError):
        driver.unmap(start)
    driver.release_page(page)
    driver.free_range(start)


def test_seed_repeats_random_numbers(plugin: Platform) -> None:
    plugin.manual_seed(7)
    first, second = (torch.rand(16, device=plugin.device()).tolist() for _ in range(2))
    plugin.manual_seed(7)
    assert torch.rand(16, device=plugin.device()).tolist() == first
    assert first != second


def test_streams_and_events_are_there_exactly_if_promised(plugin: Platform) -> None:
    if not plugin.capabilities.streams:
        with pytest.raises(PlatformError, match=r"capabilities\.streams"):
            plugin.new_stream()
        with pytest.raises(PlatformError, match=r"capabilities\.streams"):
            plugin.new_event()
        return
    producer, consumer, written = plugin.new_stream(), plugin.new_stream(), plugin.new_event()
    x = torch.zeros(1 << 20, device=plugin.device())
    plugin.synchronize()
    with producer.context():
        for _ in range(50):
            x += 1
        written.record(producer)
    consumer.wait_event(written)
    with consumer.context():
        y = x * 2
    consumer.synchronize()
    assert written.query()
    written.synchronize()
    producer.synchronize()
    assert y.eq(100).all()


class Doubler(torch.nn.Module):
    """The smallest model with decoder layers."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_graph_replays_on_the_current_contents_of_its_buffers(plugin: Platform) -> None:
    if plugin.capabilities.graph == "none":
        with pytest.raises(PlatformError, match=r"capabilities\.graph"):
            plugin.graph_backend()
        return
    backend, model = plugin.graph_backend(), Doubler()
    backend.prepare_model(model)
    graphs: dict[int, tuple[torch.Tensor, Graph]] = {}
    with torch.inference_mode():
        for size in (4, 2):
            buffer = torch.zeros(size, device=plugin.device())
            graphs[size] = buffer, backend.capture(lambda buffer=buffer: model(buffer))
        for size, (buffer, graph) in graphs.items():
            for value in (3.0, -1.0):
                buffer.fill_(value)
                output = graph.replay()
                plugin.synchronize()
                assert output.tolist() == [value * 4 + 3] * size


def test_pieces_of_a_graph_leave_room_for_calls_between_them(plugin: Platform) -> None:
    """What is called reads memory of the piece before, for as many rows as it likes, and writes for the next."""
    if plugin.capabilities.graph == "none":
        return
    backend = plugin.graph_backend()
    if plugin.capabilities.graph != "capture":
        with pytest.raises(PlatformError, match="not captured in pieces"):
            backend.capture_pieces(lambda cut: torch.zeros(1))
        return
    count = [0]
    buffer, middle = (torch.zeros(8, 4, device=plugin.device()) for _ in range(2))

    def square(tensors: Sequence[torch.Tensor]) -> None:
        middle[: count[0]].copy_(tensors[0][: count[0]] ** 2)

    def run_on(size: int) -> Callable[[Cut], torch.Tensor]:
        def run(cut: Cut) -> torch.Tensor:
            x, kept = buffer[:size] + 1, buffer[:size] * 10
            for _ in range(2):
                wide = torch.cat((x, x), dim=1)  # a view of it is what the call gets
                cut(square, [wide[:, 4:]])
                x = middle[:size] + kept
            return x

        return run

    with torch.inference_mode():
        graphs = {size: backend.capture_pieces(run_on(size)) for size in (8, 3)}
        for size, value in ((8, 1.0), (3, 2.0), (8, 0.0)):
            count[0] = size - 1
            buffer.fill_(value)
            output = graphs[size].replay()[: count[0]].cpu()
            wanted = ((value + 1) ** 2 + 10 * value) ** 2 + 10 * value
            assert torch.equal(output, torch.full_like(output, wanted))


def test_inference_context_can_be_nested_and_repeated(plugin: Platform) -> None:
    for _ in range(2):
        with plugin.inference_context(), plugin.inference_context():
            assert torch.ones(2, device=plugin.device()).sum().item() == 2


def test_the_collective_backend_works_on_the_device(plugin: Platform) -> None:
    dist.init_process_group(plugin.collective_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.arange(4.0, device=plugin.device())
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
        plugin.synchronize()
        assert x.tolist() == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()
