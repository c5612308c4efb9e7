"""The CPU's graphs: layers share one compilation, plain code runs outside replay, and hooks take
precedence."""

from __future__ import annotations

import os

import pytest
import torch
from torch._dynamo.utils import counters
from xllm_platform.base import PlatformError
from xllm_platform.cpu import graph
from xllm_platform.cpu.graph import CompileBackend


class Attention:
    """Stands for an attention backend: state of its own, not compiled, different for each layer."""

    def __init__(self) -> None:
        self.layers_seen: list[int] = []

    @torch.compiler.disable
    def forward(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        self.layers_seen.append(layer)
        return query * (layer + 1)


class Layer(torch.nn.Module):
    def __init__(self, index: int, attention: Attention) -> None:
        super().__init__()
        self.index, self.attention = index, attention
        self.q = torch.nn.Linear(8, 8)
        self.mlp = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention.forward(self.index, self.q(x))
        return x + torch.nn.functional.silu(self.mlp(x))


class Model(torch.nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = Attention()
        self.layers = torch.nn.ModuleList(Layer(i, self.attention) for i in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_layers_share_one_compilation_and_sizes_share_two() -> None:
    model, backend = Model(num_layers=6), CompileBackend()
    backend.prepare_model(model)
    with torch.inference_mode():
        for size in (1, 2, 4, 8):
            x = torch.randn(size, 8)
            plain = model(x)
            captured = backend.capture(lambda x=x: model(x))
            model.attention.layers_seen.clear()
            torch.testing.assert_close(captured.replay(), plain, rtol=1e-4, atol=1e-4)
            assert model.attention.layers_seen == [0, 1, 2, 3, 4, 5]
    # Two graphs (before and after attention), for batch 1 and for all others, and one more when the layer's number
    # is first seen to vary; compiling each layer and size would give 48.
    assert 4 <= counters["stats"]["unique_graphs"] <= 6


class Hooked(torch.nn.Module):
    """A layer, or a model, that says itself what runs in a decode step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def compile_decode(self):
        return lambda x: x + 100


@pytest.mark.parametrize("as_layer", [True, False])
def test_a_modules_own_decode_takes_precedence_and_only_in_replay(as_layer: bool) -> None:
    model: torch.nn.Module = Hooked()
    if as_layer:
        layers = torch.nn.ModuleList([model])
        model = torch.nn.Sequential(model)
        object.__setattr__(model, "layers", layers)  # not as a submodule, which Sequential would run
    backend = CompileBackend()
    backend.prepare_model(model)
    x = torch.zeros(2)
    assert model(x).tolist() == [1, 1]
    captured = backend.capture(lambda: model(x))
    assert captured.replay().tolist() == [100, 100]
    assert model(x).tolist() == [1, 1]
    assert counters["stats"]["unique_graphs"] == 0


def test_plain_code_runs_again_after_a_replay_that_failed() -> None:
    model, backend = Hooked(), CompileBackend()
    backend.prepare_model(model)

    def run() -> torch.Tensor:
        model(torch.zeros(1))
        raise ValueError("in the middle of a step")

    with pytest.raises(ValueError, match="middle of a step"):
        backend.capture(run)
    assert model(torch.zeros(1)).item() == 1


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    for attempt in (lambda b: b.prepare_model(Hooked()), lambda b: b.capture(lambda: torch.zeros(1))):
        with pytest.raises(PlatformError, match=r"install g\+\+, or turn enable_graph off"):
            attempt(CompileBackend())


def test_no_python_headers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph.sysconfig, "get_paths", lambda: {"include": os.devnull})
    with pytest.raises(PlatformError, match="install python3-dev"):
        CompileBackend().prepare_model(Hooked())
