"""Engines on the emulated NPU that sleep and wake, by graphs too: tokens, weights bit for bit, the device's bytes."""

from __future__ import annotations

import pytest
import torch
from npu_emulator import fake_cann

from tests.npu_lab.test_serving import NEW_TOKENS, float32, model, prompts  # noqa: F401
from tests.support.engine import run_engine
from tests.support.hf_model import make_hf_model
from tests.support.sleeping import answer, engine_of, opened, resume, suspend

pytestmark = [pytest.mark.npu_lab, pytest.mark.usefixtures("float32")]
VMM = {"platform": "npu", "enable_vmm_weights": True, "enable_vmm_kvcache": True, "max_cache_size": "96MiB",
       "max_model_len": 1024, "max_seqs_per_batch": 256}
KINDS = {"fixed": VMM, "elastic": {**VMM, "vmm_elastic": True},
         "weights only": {**VMM, "vmm_elastic": True, "enable_vmm_kvcache": False}}
GRAPHS = {"attention_backend": "npu", "enable_graph": True, "graph_batch_sizes": (1, 4, 16)}


def live_bytes() -> int:
    return fake_cann.counters().physical_bytes_live


@pytest.mark.parametrize(("kind", "attention"), [
    pytest.param(kind, attention, marks=[] if "npu" in attention or kind == "elastic" else [pytest.mark.slow])
    for kind in KINDS for attention in ("torch", "npu", "triton")])
def test_tokens_and_weights_after_each_level(model, kind, attention) -> None:  # noqa: F811
    directory, expected = model("llama")
    nothing = live_bytes()
    with opened(directory, **KINDS[kind], attention_backend=attention) as loop:
        assert answer(loop, prompts(), NEW_TOKENS) == expected
        before, awake = engine_of(loop).weights_hash(), live_bytes()
        for level in (1, 2, 1):
            assert suspend(loop, level) == awake - nothing
            assert live_bytes() == nothing
            resume(loop)
            assert live_bytes() == awake
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, prompts(), NEW_TOKENS) == expected
    assert live_bytes() == nothing


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_captured_graphs_find_their_weights_and_cache(model, architecture) -> None:  # noqa: F811
    """The same graphs, which hold addresses."""
    attention = "triton" if architecture == "deepseek_v3" else "npu"
    room = {"attention_backend": attention, "max_cache_size": "320MiB"}  # the experts of this checkpoint are large
    directory, expected = model(architecture)
    with opened(directory, **{**KINDS["elastic"], **GRAPHS, **room}) as loop:
        assert answer(loop, prompts(), NEW_TOKENS) == expected
        for level in (1, 2):
            suspend(loop, level)
            resume(loop)
            graphs, launches = fake_cann.counters().graphs_live, fake_cann.counters().graph_launches
            assert answer(loop, prompts(), NEW_TOKENS) == expected
            assert fake_cann.counters().graph_launches > launches
            assert fake_cann.counters().graphs_live == graphs


def test_models_through_transformers_code(tmp_path) -> None:
    """Planned in the host's memory, loaded into the device's pages."""
    directory = make_hf_model(tmp_path / "m", "gpt2")
    options = {"model_impl": "transformers", "max_model_len": 512}
    asked = prompts()[:4]
    expected = run_engine(directory, asked, 8, **options, platform="cpu")[0]
    nothing = live_bytes()
    with opened(directory, **{**KINDS["elastic"], **options, "attention_backend": "torch"}) as loop:
        assert answer(loop, asked, 8) == expected
        before = engine_of(loop).weights_hash()
        for level in (1, 2):
            suspend(loop, level)
            assert live_bytes() == nothing
            resume(loop)
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, asked, 8) == expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_devices_by_graphs(model, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setenv("FAKECANN_DEVICES", "2")
    directory, expected = model("llama")
    with opened(directory, **KINDS["elastic"], **GRAPHS, tp_size=2) as loop:
        assert answer(loop, prompts(), NEW_TOKENS) == expected
        before = engine_of(loop).weights_hash()
        for level in (1, 2):
            suspend(loop, level)
            resume(loop)
            assert engine_of(loop).weights_hash() == before
            assert answer(loop, prompts(), NEW_TOKENS) == expected


def pinned_bytes() -> int:
    return torch.npu.host_memory_stats()["allocated_bytes.current"]


def test_level_1_reads_no_file_and_keeps_pinned_memory_while_asleep(model, tmp_path) -> None:  # noqa: F811
    """The checkpoint may be gone."""
    directory, expected = model("llama")
    with opened(directory, **KINDS["elastic"], attention_backend="torch") as loop:
        before = pinned_bytes()
        freed = suspend(loop, 1)
        assert 400_000 < pinned_bytes() - before <= freed
        file = directory / "model.safetensors"
        file.rename(tmp_path / "away")
        try:
            resume(loop)
        finally:
            (tmp_path / "away").rename(file)
        assert pinned_bytes() <= before  # a block that the load has left may be free by now
        assert answer(loop, prompts(), NEW_TOKENS) == expected
