"""Engines and a server that decode by graphs on the emulated NPU: greedy tokens in float32 equal the CPU platform's."""

from __future__ import annotations

import gc
import inspect
import textwrap
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from npu_emulator import dispatch, fake_cann
from xllm_models.hub import resolve_model

from tests.npu_lab.test_serving import CHUNKS, NEW_TOKENS, WAYS, float32, model, prompts  # noqa: F401
from tests.support.engine import run_engine
from tests.support.server import ServerProcess
from xllm_npu.execution import graph_plan, input_builder, load_plan
from xllm_npu.execution.graph_runner import GraphRunner
from xllm_npu.execution.input_builder import InputBuilder
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.execution.worker import Worker
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.kv_cache.block_pool import DUMMY_BLOCK, BlockPool

pytestmark = [pytest.mark.npu_lab, pytest.mark.usefixtures("float32")]
GRAPHS = {"platform": "npu", "attention_backend": "npu", "enable_graph": True}


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens_as_on_the_cpu(model, way: str) -> None:  # noqa: F811
    directory, expected = model("llama")
    before = fake_cann.counters()
    dispatch.calls.clear()
    answers, loop = run_engine(directory, prompts(), NEW_TOKENS, **GRAPHS, **WAYS[way])
    assert answers == expected
    found = fake_cann.counters().since(before)
    assert found["graph_launches"] >= NEW_TOKENS - 1
    assert found["task_updates"] == 2 * found["graph_launches"]  # layers
    assert dispatch.calls["npu::npu_fused_infer_attention_score_v2:update"] == found["task_updates"]
    assert loop.scheduler.stats.preemptions_total > 0 or way != "preemption"
    assert loop.scheduler.stats.prefix_hits_total > 0 or way == "all off"
    assert loop.scheduler.stats.graph_misses_total == 0


@pytest.mark.parametrize("architecture", ["llama", "mistral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_own_kernels_need_no_update(model, architecture: str) -> None:  # noqa: F811
    """They read lengths from device memory: keys and values, a sliding window, latents."""
    directory, expected = model(architecture)
    before = fake_cann.counters()
    dispatch.calls.clear()
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, **{**GRAPHS, "attention_backend": "triton"}, **CHUNKS)
    assert answers == expected
    found = fake_cann.counters().since(before)
    assert found["graph_launches"] >= NEW_TOKENS - 1
    assert found["task_updates"] == 0
    kernel = "mla_decode_kernel" if architecture == "deepseek_v3" else "paged_decode_kernel"
    assert dispatch.calls[f"triton::{kernel}:capture"] > 0


@pytest.mark.parametrize("architecture", ["mistral", "qwen3_moe"])
def test_architectures(model, architecture: str) -> None:  # noqa: F811
    directory, expected = model(architecture)
    launches = fake_cann.counters().graph_launches
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, **GRAPHS, **CHUNKS)
    assert answers == expected
    assert fake_cann.counters().graph_launches > launches


@pytest.mark.multiprocess
@pytest.mark.parametrize(("architecture", "sizes"), [("llama", {"tp_size": 2}),
                                                     ("qwen3_moe", {"tp_size": 2, "ep_size": 2})])
def test_two_devices(model, monkeypatch: pytest.MonkeyPatch, architecture: str, sizes: dict) -> None:  # noqa: F811
    monkeypatch.setenv("FAKECANN_DEVICES", "2")
    directory, expected = model(architecture)
    launches = fake_cann.counters().graph_launches
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, **GRAPHS, **CHUNKS, **sizes)
    assert answers == expected
    assert fake_cann.counters().graph_launches > launches


@pytest.mark.multiprocess
def test_a_server_answers_a_client(model, tmp_path: Path) -> None:  # noqa: F811
    directory, expected = model("llama")
    flags = ("--platform", "npu", "--attention-backend", "npu", "--dtype", "float32", "--enable-graph")
    with (ServerProcess(directory, tmp_path, *flags) as server,
          openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client):
        for prompt, tokens in list(zip(prompts(), expected))[-3:]:
            answer = client.completions.create(
                model=directory.name, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0,
                extra_body={"return_token_ids": True})
            assert answer.choices[0].model_extra["token_ids"] == tokens


@pytest.mark.model
def test_smollm2() -> None:
    """Real weights, lengths of several blocks of 128."""
    directory = resolve_model("smollm2").path
    rng = np.random.default_rng(5)
    asked = [rng.integers(0, 49152, n).tolist() for n in (3, 126, 300)]
    options = {"max_cache_size": "64MiB", "block_size": 128, "max_model_len": 512}
    expected, _ = run_engine(directory, asked, 8, platform="cpu", **options)
    launches = fake_cann.counters().graph_launches
    assert run_engine(directory, asked, 8, **GRAPHS, graph_batch_sizes=(2, 4), **options)[0] == expected
    assert fake_cann.counters().graph_launches >= launches + 7


def test_nothing_but_sampled_tokens_comes_to_the_host(model, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    copies: dict[str, list[int]] = {"capture": [], "step": []}

    def counted(kind: str, method):
        def call(*args, **kwargs):
            before = fake_cann.counters().d2h_calls
            result = method(*args, **kwargs)
            copies[kind].append(fake_cann.counters().d2h_calls - before)
            return result

        return call

    monkeypatch.setattr(GraphRunner, "capture", counted("capture", GraphRunner.capture))
    monkeypatch.setattr(Worker, "execute", counted("step", Worker.execute))
    before = fake_cann.counters()
    run_engine(model("llama")[0], prompts(), NEW_TOKENS, **GRAPHS, **CHUNKS)
    assert set(copies["capture"]) == {0}
    launches = fake_cann.counters().graph_launches - before.graph_launches
    decodes = copies["step"][-(NEW_TOKENS // 2):]  # nothing but decodes at the end
    assert launches >= len(decodes)
    assert set(decodes) == {1}  # one copy a step, the tokens
    assert set(copies["step"]) <= {0, 1}


def test_a_batch_above_the_largest_graph(model, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    directory, expected = model("llama")
    answers, loop = run_engine(directory, prompts(), NEW_TOKENS, **GRAPHS, graph_batch_sizes=(1, 4), **CHUNKS)
    assert answers == expected
    assert loop.scheduler.stats.graph_misses_total > 1
    assert sum("run without a graph" in record.message for record in caplog.records) == 1


def test_streams_allow_fewer_graphs(model, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
                                    caplog: pytest.LogCaptureFixture) -> None:
    directory, expected = model("llama")
    run_engine(directory, [[1]], 1, **{**GRAPHS, "enable_graph": False})  # takes streams that a process keeps
    captured: list[list[int]] = []
    original = GraphRunner.capture
    monkeypatch.setattr(GraphRunner, "capture",
                        lambda self, sizes, *rest: captured.append(sizes) or original(self, sizes, *rest))
    monkeypatch.setattr(graph_plan, "STREAMS_KEPT", streams_left() - 3)
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, **GRAPHS, **CHUNKS)
    assert answers == expected
    assert captured[:2] == [[64], [56]]
    assert captured[2:] == [[1, 24, 64]]
    assert sum("allow 3 of" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(graph_plan, "STREAMS_KEPT", streams_left())
    with pytest.raises(LoadError, match="turn enable_graph off"):
        run_engine(directory, prompts(), NEW_TOKENS, **GRAPHS, **CHUNKS)


def streams_left() -> int:
    from xllm_platform.registry import select

    gc.collect()  # engines that have ended
    torch.npu.synchronize()
    left = select("npu").graph_backend().streams_left()
    assert left is not None
    return left


def test_what_graphs_take_is_known_before_the_cache_is_sized(model, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Compared with what the device has less after the captures."""
    planned, free = [], []
    bytes_of, capture = graph_plan.GraphCost.bytes, GraphRunner.capture
    monkeypatch.setattr(graph_plan.GraphCost, "bytes",
                        lambda self, count: planned.append(bytes_of(self, count)) or planned[-1])

    def watched(self, *args):
        free.append(torch.npu.mem_get_info()[0])
        capture(self, *args)
        free.append(torch.npu.mem_get_info()[0])

    monkeypatch.setattr(GraphRunner, "capture", watched)
    left: list[int] = []
    num_blocks = load_plan.num_kv_blocks
    monkeypatch.setattr(load_plan, "num_kv_blocks",
                        lambda request: left.append(torch.npu.memory_allocated()) or num_blocks(request))
    for enable_graph in (False, True):
        run_engine(model("llama")[0], prompts(), 4, **{**GRAPHS, "enable_graph": enable_graph}, **CHUNKS)
    assert left[-1] - left[-2] < 4 << 20, "the trial's attention is still there: its mask alone has 4 MiB"
    taken = free[-2] - free[-1]
    assert 0 <= taken <= planned[0]
    assert planned[0] > 0


def test_padded_rows_that_keep_their_slots(model, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """They then write to blocks of sequences."""
    directory, expected = model("llama")
    source = textwrap.dedent(inspect.getsource(InputBuilder._pad))
    line = "self.slots.host[size:graph_size] = 0"
    assert source.count(line) == 1
    scope = dict(vars(input_builder))
    exec(source.replace(line, "pass"), scope)
    monkeypatch.setattr(InputBuilder, "_pad", scope["_pad"])
    answers, _ = run_engine(directory, prompts(), NEW_TOKENS, **GRAPHS, graph_batch_sizes=(16,), **CHUNKS)
    assert answers != expected


def test_without_a_dummy_block(model, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A sequence gets block 0: right without padded rows, wrong with them."""
    directory, expected = model("llama")
    make = BlockPool.__init__

    def make_without(self: BlockPool, num_blocks: int) -> None:
        make(self, num_blocks)
        self._empty.append(DUMMY_BLOCK)

    monkeypatch.setattr(BlockPool, "__init__", make_without)
    monkeypatch.setattr(BlockPool, "num_used", 0)
    monkeypatch.setattr(Scheduler, "check_integrity", lambda _: None)
    options = {**GRAPHS, "graph_batch_sizes": (16,), **CHUNKS}
    assert run_engine(directory, prompts(), NEW_TOKENS, **{**options, "enable_graph": False})[0] == expected
    assert run_engine(directory, prompts(), NEW_TOKENS, **options)[0] != expected
