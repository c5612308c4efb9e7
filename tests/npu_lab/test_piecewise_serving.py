"""Engines and a server whose steps with prompts run in captured pieces on the emulated NPU: greedy tokens in float32
equal the CPU platform's. Models have two layers, so a size takes three graphs.
"""

from __future__ import annotations

import gc
import inspect
import sys
import textwrap
from pathlib import Path

import openai
import pytest
import torch
from npu_emulator import fake_cann
from xllm_platform.graph_pieces import PieceRow
from xllm_platform.registry import select

from tests.npu_lab.test_graph_serving import GRAPHS, streams_left
from tests.npu_lab.test_serving import CHUNKS, NEW_TOKENS, WAYS, float32, model, prompts  # noqa: F401
from tests.support.engine import run_engine
from tests.support.server import ServerProcess
from xllm_npu.execution import graph_plan
from xllm_npu.execution.captured_graphs import CapturedGraphs
from xllm_npu.execution.graph_runner import GraphRunner
from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.execution.piecewise_runner import PiecewiseRunner
from xllm_npu.execution.worker import Worker

pytestmark = [pytest.mark.npu_lab, pytest.mark.usefixtures("float32")]
PIECES = {**GRAPHS, "enable_prefill_piecewise_graph": True, "graph_batch_sizes": (4, 16)}
MIXED = {**CHUNKS, "max_tokens_per_batch": 100}  # sizes 64 and 100
LAYERS = 2


class Watch:
    """What runners capture and run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[tuple[graph_plan.GraphSizes, int]] = []  # and the graphs that the device has more
        self.steps: list[tuple[int, int, int]] = []  # decodes, prompts, padded tokens
        self.decode_steps = 0
        capture, run, run_decodes = CapturedGraphs.capture, PiecewiseRunner.run, GraphRunner.run

        def watched_capture(runner, sizes, on_progress):
            before = fake_cann.counters().graphs_live
            capture(runner, sizes, on_progress)
            self.captured.append((sizes, fake_cann.counters().graphs_live - before))

        def watched_run(runner, model_input):
            metadata = model_input.attention
            self.steps.append((metadata.num_decodes, metadata.num_prefills, model_input.token_ids.shape[0]))
            return run(runner, model_input)

        def watched_decodes(runner, model_input):
            self.decode_steps += 1
            return run_decodes(runner, model_input)

        monkeypatch.setattr(CapturedGraphs, "capture", watched_capture)
        monkeypatch.setattr(PiecewiseRunner, "run", watched_run)
        monkeypatch.setattr(GraphRunner, "run", watched_decodes)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.mark.parametrize("attention", ["npu", "triton"])
@pytest.mark.parametrize("way", [*(pytest.param(way, marks=pytest.mark.slow) for way in WAYS), "mixed steps"])
def test_same_tokens_as_on_the_cpu(model, watch: Watch, attention: str, way: str) -> None:  # noqa: F811
    directory, expected = model("llama")
    before = fake_cann.counters()
    options = {**PIECES, "attention_backend": attention, **(MIXED if way == "mixed steps" else WAYS[way])}
    answers, loop = run_engine(directory, prompts(), NEW_TOKENS, **options)
    assert answers == expected
    stats, found = loop.scheduler.stats, fake_cann.counters().since(before)
    (sizes, graphs), most = watch.captured[-1], options["max_tokens_per_batch"]
    assert sizes.prefill == [size for size in (64, 128, 256, 512) if size < most] + [most]
    assert graphs == len(sizes.prefill) * (LAYERS + 1) + len(sizes.decode)
    assert stats.prefill_graph_misses_total == 0
    assert len(watch.steps) + watch.decode_steps == stats.steps_total + 2, "all steps, and two to warm up"
    assert found["graph_launches"] == len(watch.steps) * (LAYERS + 1) + watch.decode_steps
    assert found["task_updates"] == (LAYERS * watch.decode_steps if attention == "npu" else 0)
    assert any(decodes and new for decodes, new, _ in watch.steps) or way == "all off"
    assert stats.preemptions_total > 0 or way != "preemption"
    assert stats.prefix_hits_total > 0 or way == "all off"


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "attention"), [("mistral", "npu"), ("qwen3_moe", "npu"), ("gemma2", "triton"),
                                                         ("deepseek_v3", "triton")])
def test_architectures(model, watch: Watch, architecture: str, attention: str) -> None:  # noqa: F811
    """A sliding window, experts, norms behind each part, latents."""
    directory, expected = model(architecture)
    options = {**PIECES, "attention_backend": attention, **MIXED}
    assert run_engine(directory, prompts(), NEW_TOKENS, **options)[0] == expected
    assert {padded for _, _, padded in watch.steps} == {64, 100}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("architecture", "sizes"), [("llama", {"tp_size": 2}),
                                                     ("qwen3_moe", {"tp_size": 2, "ep_size": 2})])
def test_two_devices(model, monkeypatch: pytest.MonkeyPatch, watch: Watch, architecture: str,  # noqa: F811
                     sizes: dict) -> None:
    monkeypatch.setenv("FAKECANN_DEVICES", "2")
    directory, expected = model(architecture)
    assert run_engine(directory, prompts(), NEW_TOKENS, **PIECES, **MIXED, **sizes)[0] == expected
    assert {padded for _, _, padded in watch.steps} == {64, 100}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("architecture", "more"), [("llama", ()), ("qwen3_moe", ("--dp-size", "2"))])
def test_a_server_answers_a_client(model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,  # noqa: F811
                                   architecture: str, more: tuple[str, ...]) -> None:
    """With experts and two data-parallel ranks, which pad to the size of the one that has more tokens."""
    monkeypatch.setenv("FAKECANN_DEVICES", "2")
    directory, expected = model(architecture)
    flags = ("--platform", "npu", "--attention-backend", "npu", "--dtype", "float32", "--enable-graph",
             "--graph-batch-sizes", "4", "--enable-prefill-piecewise-graph", "--max-tokens-for-graph-mode", "128")
    with (ServerProcess(directory, tmp_path, *flags, *more) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client):
        for prompt, tokens in list(zip(prompts(), expected))[-3:]:
            answer = client.completions.create(
                model=directory.name, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0,
                extra_body={"return_token_ids": True})
            assert answer.choices[0].model_extra["token_ids"] == tokens


def test_nothing_but_sampled_tokens_comes_to_the_host(model, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
                                                      watch: Watch) -> None:
    copies: dict[str, list[int]] = {"capture": [], "pieces": [], "step": []}

    def counted(kind: str, method):
        def call(*args, **kwargs):
            before = fake_cann.counters().d2h_calls
            result = method(*args, **kwargs)
            copies[kind].append(fake_cann.counters().d2h_calls - before)
            return result

        return call

    monkeypatch.setattr(PiecewiseRunner, "capture", counted("capture", PiecewiseRunner.capture))
    monkeypatch.setattr(PieceRow, "replay", counted("pieces", PieceRow.replay))
    monkeypatch.setattr(Worker, "execute", counted("step", Worker.execute))
    run_engine(model("llama")[0], prompts(), NEW_TOKENS, **PIECES, **MIXED)
    assert set(copies["capture"]) == {0}
    assert len(copies["pieces"]) == len(watch.steps) > 4
    assert set(copies["pieces"]) == {0}
    assert set(copies["step"]) <= {0, 1}


def test_a_step_above_the_largest_size_runs_eagerly(model, watch: Watch) -> None:  # noqa: F811
    directory, expected = model("llama")
    answers, loop = run_engine(directory, prompts(), NEW_TOKENS, **PIECES, **MIXED, max_tokens_for_graph_mode=64)
    assert answers == expected
    stats = loop.scheduler.stats
    assert stats.prefill_graph_misses_total > 1
    assert stats.graph_misses_total == 0
    assert {padded for _, _, padded in watch.steps} == {64}
    eager = stats.steps_total + 2 - len(watch.steps) - watch.decode_steps
    assert eager == stats.prefill_graph_misses_total + 1, "a longer prompt warms up too"


@pytest.mark.slow
def test_streams_allow_fewer_sizes(model, monkeypatch: pytest.MonkeyPatch, watch: Watch,  # noqa: F811
                                   caplog: pytest.LogCaptureFixture) -> None:
    directory, expected = model("llama")
    run_engine(directory, [[1]], 1, **{**GRAPHS, "enable_graph": False})  # takes streams that a process keeps
    spare = len(PIECES["graph_batch_sizes"]) + 2 * (LAYERS + 1)
    monkeypatch.setattr(graph_plan, "STREAMS_KEPT", streams_left() - spare)
    options = {**PIECES, **WAYS["all off"]}
    assert run_engine(directory, prompts(), NEW_TOKENS, **options)[0] == expected
    assert watch.captured[-1][0] == graph_plan.GraphSizes([4, 16], [64, 1024])
    assert sum("allow 2 of 5 rows of graphs for prompts" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(graph_plan, "STREAMS_KEPT", streams_left() - 4)
    with pytest.raises(LoadError, match=r"one takes 3: turn enable_prefill_piecewise_graph off"):
        run_engine(directory, prompts(), NEW_TOKENS, **options)


@pytest.mark.slow
def test_what_graphs_take_is_known_before_the_cache_is_sized(model, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Compared with what the device has less after the captures."""
    planned, taken = [], []
    choose, capture = graph_plan.GraphCosts.choose, CapturedGraphs.capture

    def watched_choose(costs, wanted, counts):
        found = choose(costs, wanted, counts)
        planned.append((costs.prefill.bytes(len(wanted.prefill)), found[1]))
        return found

    def watched(graphs, sizes, on_progress):
        before = torch.npu.mem_get_info()[0]
        capture(graphs, sizes, on_progress)
        taken.append(before - torch.npu.mem_get_info()[0])

    monkeypatch.setattr(graph_plan.GraphCosts, "choose", watched_choose)
    monkeypatch.setattr(CapturedGraphs, "capture", watched)
    run_engine(model("llama")[0], prompts(), 4, **PIECES, **WAYS["all off"])
    prefill, total = planned[0]
    assert 0 < prefill <= total
    assert 0 < taken[-1] <= total


def test_calls_do_not_keep_the_graphs_memory(device: torch.device) -> None:
    """With more pieces nothing more is allocated: what calls are given lies where others' tensors lay."""
    reserved = []
    for cuts in (2, 12):
        gc.collect()
        torch.npu.empty_cache()
        backend = select("npu").graph_backend()
        wide = torch.zeros(1 << 20, dtype=torch.float16, device=device)  # 2 MiB

        def run(cut, out: torch.Tensor = wide, cuts: int = cuts) -> torch.Tensor:
            for _ in range(cuts):
                out = out + 1
                cut(lambda tensors: tensors[0].add_(1), [out])
            return out

        before = torch.npu.memory_reserved()
        row = backend.capture_pieces(run)
        reserved.append(torch.npu.memory_reserved() - before)
        assert row.replay()[0].item() == 2 * cuts
        del row, backend
    assert reserved[1] == reserved[0]


MUTATIONS = {
    "padded tokens keep their slots": (InputBuilder, "_send", "self.slots.send(tokens)",
                                       "self.slots.send(padded_tokens or tokens)"),
    "the rows of the step before": (PiecewiseRunner, "run", "self._num_tokens = ", "self._num_tokens = "
                                    "self._num_tokens or "),
    "a stale query_start": (PiecewiseRunner, "run", "self._attention.prepare(model_input.attention)",
                            "self._num_tokens or self._attention.prepare(model_input.attention)"),
    "one piece runs twice": (PieceRow, "replay", "graph.replay()", "self._graphs[0].replay()"),
    "the last piece does not run": (PieceRow, "replay", "self._graphs[-1].replay()", "pass"),
    "attention is not called": (PieceRow, "replay", "between.call(between.tensors)", "pass"),
    "attention of one layer for all": (PieceRow, "replay", "between.call(between.tensors)",
                                       "self._calls[0].call(between.tensors)"),
    "another bucket's graphs": (PiecewiseRunner, "run", "[model_input.token_ids.shape[0]]", "[self.sizes[0]]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["npu", "triton"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_changed_is_missed(model, monkeypatch: pytest.MonkeyPatch, name: str, attention: str) -> None:  # noqa: F811
    kind, method, old, new = MUTATIONS[name]
    directory, expected = model("llama")
    source = textwrap.dedent(inspect.getsource(getattr(kind, method)))
    assert source.count(old) == 1
    scope = dict(vars(sys.modules[kind.__module__]))
    exec("from __future__ import annotations\n" + source.replace(old, new), scope)
    monkeypatch.setattr(kind, method, scope[method])
    try:
        answers = run_engine(directory, prompts(), NEW_TOKENS,
                             **{**PIECES, "attention_backend": attention, **MIXED})[0]
    except (RuntimeError, ValueError, AssertionError):  # what the device, or an operator's reference, refuses
        return
    assert answers != expected
