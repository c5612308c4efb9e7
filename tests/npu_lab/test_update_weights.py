"""Weights that are replaced on the emulated NPU: by the same graphs, in the same memory, on one device and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from npu_emulator import fake_cann

from tests.npu_lab.test_serving import NEW_TOKENS, float32, model, prompts  # noqa: F401
from tests.npu_lab.test_sleeping import GRAPHS, KINDS
from tests.support.engine import run_engine
from tests.support.sleeping import answer, opened
from tests.support.tiny_model import make_tiny_model
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.state.messages import CheckWeights, Resume, UpdateWeights

pytestmark = [pytest.mark.npu_lab, pytest.mark.usefixtures("float32"), pytest.mark.slow]
PLAIN = {"platform": "npu", "max_cache_size": "96MiB", "max_model_len": 1024, "max_seqs_per_batch": 256}


def update(loop: EngineLoop, checkpoint: Path) -> None:
    for message in (CheckWeights(str(checkpoint)), UpdateWeights(str(checkpoint)), Resume()):
        assert loop.change(message).error == ""


@pytest.mark.parametrize("kind", ["plain", "elastic"])
def test_captured_graphs_use_the_new_weights(model, tmp_path, kind) -> None:  # noqa: F811
    directory, expected = model("llama")
    new = make_tiny_model(tmp_path / "m", "llama", seed=7)
    with opened(directory, **{**KINDS.get(kind, PLAIN), **GRAPHS}) as loop:
        assert answer(loop, prompts(), NEW_TOKENS) == expected
        live = fake_cann.counters().physical_bytes_live
        for checkpoint in (new, directory):
            update(loop, checkpoint)
            graphs, launches = fake_cann.counters().graphs_live, fake_cann.counters().graph_launches
            wanted = run_engine(checkpoint, prompts(), NEW_TOKENS, platform="cpu")[0]
            assert answer(loop, prompts(), NEW_TOKENS) == wanted
            assert fake_cann.counters().graph_launches > launches
            assert fake_cann.counters().graphs_live == graphs
            assert fake_cann.counters().physical_bytes_live == live


@pytest.mark.multiprocess
def test_two_devices(model, tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setenv("FAKECANN_DEVICES", "2")
    directory, expected = model("llama")
    new = make_tiny_model(tmp_path / "m", "llama", seed=7)
    with opened(directory, **PLAIN, **GRAPHS, tp_size=2) as loop:
        assert answer(loop, prompts(), NEW_TOKENS) == expected
        update(loop, new)
        assert answer(loop, prompts(), NEW_TOKENS) == run_engine(new, prompts(), NEW_TOKENS, platform="cpu")[0]
