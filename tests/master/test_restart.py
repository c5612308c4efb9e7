"""An engine that dies while the HTTP process is still becoming ready for it does not count as ready."""

import asyncio

import pytest

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_group import EngineGroup
from xllm_npu.master.llm_master import EngineStatus, LLMMaster
from xllm_npu.master.model_residency import ServedWeights
from xllm_npu.state.messages import EngineReady

READY = EngineReady(
    model_name="m", architecture="a", platform="cpu", device="d", dtype="float32", vocab_size=8, max_model_len=8,
    eos_token_ids=[], num_kv_blocks=8, block_size=4, max_seqs=1, max_tokens_per_batch=8, weight_bytes=0,
    kv_cache_bytes=0, graph_sizes=[], load_seconds=0.0, tokenizer_dir="/nowhere")


@pytest.mark.asyncio
@pytest.mark.parametrize("replaced", [True, False])
async def test_a_death_in_the_middle(monkeypatch, replaced):
    master = LLMMaster(settings_from_kwargs(model="m", restart_on_failure=True))
    loading, loaded = asyncio.Event(), asyncio.Event()

    async def load(*_):
        loading.set()
        await loaded.wait()
        return object(), object(), object()

    monkeypatch.setattr(master.text, "run", load)
    monkeypatch.setattr(EngineGroup, "alive", property(lambda group: replaced))
    becoming = asyncio.create_task(master._become_ready([READY]))
    await loading.wait()
    if replaced:
        master._engines = master._new_engines()
    loaded.set()
    await becoming
    assert master.status is EngineStatus.LOADING
    assert master.info is None


@pytest.mark.asyncio
@pytest.mark.parametrize(("weights", "checkpoint"), [(ServedWeights("m"), ""), (ServedWeights("new", 1), "new")])
async def test_new_engines_load_what_was_served(monkeypatch, weights, checkpoint):
    """A fork, whose parent's weights were replaced before, likewise."""
    parent, placed = LLMMaster(settings_from_kwargs(model="m", dp_size=2)), []

    async def start(group):
        pass

    monkeypatch.setattr(EngineGroup, "place", lambda group, plans: placed.extend(plans))
    monkeypatch.setattr(EngineGroup, "start", start)
    fork = LLMMaster(settings_from_kwargs(model="m", dp_size=2))
    fork.parent, parent._residency.weights = parent, weights
    for master in (parent, fork):
        placed.clear()
        await master._launch()
        assert [plan.init.checkpoint for plan in placed] == [checkpoint] * 2
