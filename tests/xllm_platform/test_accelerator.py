"""What npu and cuda share, against a recorded stand-in for torch's device module: order of calls, not
numbers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from xllm_platform.accelerator import AcceleratorPlatform, CaptureBackend
from xllm_platform.base import Availability, Capabilities, PlatformError


class Recorder:
    """A device module that writes down what happens to it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capture_error: Exception | None = None
        self.default = self.Stream("default")

    def Stream(self, name: str = "side", device: Any = None) -> Any:
        log = self.log

        class RecordedStream:
            def wait_stream(self, other: Any) -> None:
                log.append(f"{name} waits for {other.name}")

        stream = RecordedStream()
        stream.name = name  # type: ignore[attr-defined]
        return stream

    def current_stream(self) -> Any:
        return self.default

    def synchronize(self, index: int = 0) -> None:
        self.log.append("synchronize")

    def graph_pool_handle(self) -> str:
        self.log.append("pool")
        return "pool 1"

    @contextmanager
    def stream(self, stream: Any):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")

    @contextmanager
    def graph(self, raw: Any, pool: Any, stream: Any):
        self.log.append(f"capture into {pool} on {stream.name}")
        yield
        if self.capture_error is not None:
            raise self.capture_error
        self.log.append("captured")

    def new_graph(self) -> Any:
        log = self.log

        class RecordedGraph:
            def capture_begin(self, pool: Any) -> None:
                log.append(f"begin in {pool}")

            def capture_end(self) -> None:
                log.append("end")

            def replay(self) -> None:
                log.append("replay")

        return RecordedGraph()

    def empty_cache(self) -> None:
        self.log.append("empty cache")

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.log.append(f"device {index}")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 100 + index, 200 + index

    def get_device_name(self, index: int) -> str:
        return f"Chip {index}"


@pytest.fixture
def runtime() -> Recorder:
    return Recorder()


def test_capture_warms_up_on_a_side_stream_first(runtime: Recorder) -> None:
    backend = CaptureBackend(runtime, runtime.new_graph, torch.Tensor.detach)
    output = torch.zeros(1)

    def run() -> torch.Tensor:
        runtime.log.append("run")
        return output

    captured = backend.capture(run)
    assert runtime.log == [
        "pool",
        "side waits for default",
        "on side",
        "run",
        "run",
        "off side",
        "default waits for side",
        "synchronize",
        "capture into pool 1 on side",
        "run",
        "captured",
    ]
    runtime.log.clear()
    assert captured.replay() is output
    assert runtime.log == ["replay"]


def test_captures_share_one_memory_pool(runtime: Recorder) -> None:
    backend = CaptureBackend(runtime, runtime.new_graph, torch.Tensor.detach)
    for _ in range(3):
        backend.capture(lambda: torch.zeros(1))
    assert runtime.log.count("pool") == 1
    assert runtime.log.count("capture into pool 1 on side") == 3


def test_failed_capture_says_what_to_change(runtime: Recorder) -> None:
    backend = CaptureBackend(runtime, runtime.new_graph, torch.Tensor.detach)
    runtime.capture_error = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(PlatformError, match=r"stream is capturing.*enable_graph"):
        backend.capture(lambda: torch.zeros(1))


def test_pieces_are_captured_and_replayed_around_the_calls_between_them(runtime: Recorder) -> None:
    backend = CaptureBackend(runtime, runtime.new_graph, lambda tensor: tensor + 100)
    given, out = torch.ones(1), torch.zeros(1)

    def run(cut: Any) -> torch.Tensor:
        for number in range(2):
            runtime.log.append(f"piece {number}")
            cut(lambda tensors, number=number: runtime.log.append(f"call {number} of {tensors[0].item():.0f}"),
                [given * number])
        runtime.log.append("last piece")
        return out

    captured = backend.capture_pieces(run)
    run_once = ["piece 0", "piece 1", "last piece"]
    assert runtime.log == [
        "pool", "side waits for default", "on side", *run_once, *run_once, "off side", "default waits for side",
        "synchronize", "empty cache", "on side", "begin in pool 1", "piece 0", "end", "begin in pool 1", "piece 1",
        "end", "begin in pool 1", "last piece", "end", "off side"]  # fmt: skip
    runtime.log.clear()
    assert captured.replay().item() == 100, "the output is not kept by the graphs either"
    assert runtime.log == ["replay", "call 0 of 100", "replay", "call 1 of 101", "replay"]


def test_a_piece_that_cannot_be_captured_is_ended(runtime: Recorder) -> None:
    backend, runs = CaptureBackend(runtime, runtime.new_graph, torch.Tensor.detach), []

    def run(cut: Any) -> torch.Tensor:
        runs.append(1)
        cut(lambda tensors: None, [])
        if len(runs) > CaptureBackend.WARM_UP_RUNS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(PlatformError, match=r"stream is capturing.*enable_prefill_piecewise_graph off"):
        backend.capture_pieces(run)
    assert runtime.log[-4:] == ["begin in pool 1", "end", "begin in pool 1", "end"]


def test_device_selection(runtime: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Chip(AcceleratorPlatform):
        name, device_type, collective_backend, visible_devices_variable = (
            "chip",
            "cpu",
            "gloo",
            "CHIP_VISIBLE",
        )
        _runtime = staticmethod(lambda: runtime)
        capabilities = Capabilities()  # type: ignore[assignment]

        @classmethod
        def probe(cls) -> Availability:
            return Availability(True)

        def graph_backend(self) -> CaptureBackend:
            return CaptureBackend(runtime, runtime.new_graph, torch.Tensor.detach)

    chip = Chip()
    chip.set_device(1)
    assert runtime.log == ["device 1"]
    assert (chip.device_name(), chip.memory_info().free, chip.device().index) == ("Chip 1", 101, 1)
    monkeypatch.setenv("CHIP_VISIBLE", "4,5")
    with pytest.raises(PlatformError, match=r"no chip device 2: this process sees 2 \(CHIP_VISIBLE=4,5\)"):
        chip.set_device(2)
    assert chip.device().index == 1
