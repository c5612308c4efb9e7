"""New weights for a model over two engines: on all of them or none, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.resident_engines import RANKS, resident_engines
from xllm_npu.master.model_residency import ServedWeights
from xllm_npu.master.residency_error import ResidencyError
from xllm_npu.state.messages import (
    AWAKE,
    PAUSED,
    SLEEPING,
)


@pytest.fixture
async def setup(tmp_path):
    async with resident_engines(tmp_path) as made:
        yield made


async def test_weights_are_checked_by_all_then_paused_replaced_and_resumed(setup):
    await setup.start()
    assert await setup.model.update_weights("new", "keep", "step 100") == 1
    assert setup.weights() == ["new", "new"]
    assert setup.model.weights == ServedWeights("new", 1, "step 100")
    kinds = [line.split()[1] for line in setup.world.log]
    assert kinds == [k for k in ("checkweights", "pause", "updateweights", "resume") for _ in range(RANKS)]
    assert (setup.states(), setup.now) == ([(AWAKE, 0)] * 2, (AWAKE, 0))
    assert (setup.transitions, set(setup.model.state.last_seconds)) == ([("update", "")], {"update"})
    assert await setup.model.update_weights("newer", "abort", "") == 2


async def test_who_is_paused_stays_paused_with_the_new_weights(setup):
    await setup.start()
    await setup.model.pause("keep")
    await setup.model.update_weights("new", "keep", "")
    assert (setup.states(), setup.weights()) == ([(PAUSED, 0)] * 2, ["new"] * 2)
    await setup.model.resume()
    assert setup.states() == [(AWAKE, 0)] * 2


@pytest.mark.parametrize("rank", range(RANKS))
async def test_what_one_rank_refuses_touches_none(setup, rank):
    engines = await setup.start()
    engines[rank].refuse.add("checkweights")
    with pytest.raises(ResidencyError, match="checkweights is refused") as refused:
        await setup.model.update_weights("new", "abort", "")
    assert refused.value.code == "checkpoint"
    assert (setup.weights(), setup.states()) == (["old"] * 2, [(AWAKE, 0)] * 2)
    assert {line.split()[1] for line in setup.world.log} == {"checkweights"}, "nothing is paused or aborted for it"
    assert setup.model.weights == ServedWeights("old")


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
async def test_where_one_cannot_load_all_have_the_old_weights(setup, failing, paused):
    engines = await setup.start()
    if paused:
        await setup.model.pause("keep")
    for rank in failing:
        engines[rank].refuse.add("new")
    with pytest.raises(ResidencyError, match="updateweights is refused") as failed:
        await setup.model.update_weights("new", "keep", "")
    assert failed.value.code == "failed"
    assert setup.weights() == ["old"] * 2
    assert setup.states() == [(PAUSED if paused else AWAKE, 0)] * 2
    assert setup.model.weights == ServedWeights("old")
    assert setup.transitions[-1] == ("update", "failed")


async def test_where_the_old_weights_are_gone_too_the_engines_end(setup):
    """What has the new ones cannot go back, so they would differ; engines that are started again have the old ones."""
    engines = await setup.start()
    engines[0].refuse.add("new")
    engines[1].refuse.add("old")
    with pytest.raises(ResidencyError, match="have different weights") as gone:
        await setup.model.update_weights("new", "keep", "")
    assert gone.value.code == "gone"
    await asyncio.wait_for(setup.ended.wait(), 10)
    assert not any(engine.alive for engine in engines)
    assert setup.model.weights == ServedWeights("old")


@pytest.mark.parametrize("kind", [
    pytest.param("checkweights", marks=pytest.mark.slow), pytest.param("updateweights", marks=pytest.mark.slow),
    "resume"])
async def test_engines_that_end_during_an_update(setup, kind):
    """Those that replace them have what was served: once all have loaded, the new weights."""
    engines = await setup.start()
    setup.world.hold[kind] = asyncio.Event()
    updating = asyncio.create_task(setup.model.update_weights("new", "keep", ""))
    while await asyncio.wait_for(setup.world.heard.get(), 10) != f"1 {kind}":
        pass
    engines[1].end("was ended by SIGKILL")
    with pytest.raises(ResidencyError, match="SIGKILL") as gone:
        await asyncio.wait_for(updating, 10)
    assert gone.value.code == "gone"
    assert setup.model.weights.checkpoint == ("new" if kind == "resume" else "old")


async def test_dropped_weights_are_replaced_asleep_and_kept_ones_are_not(setup):
    await setup.start()
    await setup.model.sleep(1, "keep")
    count = len(setup.world.log)
    with pytest.raises(ResidencyError, match="sleep at level 2") as refused:
        await setup.model.update_weights("new", "keep", "")
    assert (refused.value.code, len(setup.world.log)) == ("asleep", count)
    await setup.model.sleep(2, "keep")
    await setup.model.update_weights("new", "keep", "")
    assert (setup.states(), setup.weights(), setup.now) == ([(SLEEPING, 2)] * 2, ["new"] * 2, (SLEEPING, 2))
    await setup.model.wake(["weights"])
    await setup.model.update_weights("newer", "wait", "")
    assert (setup.model.state.tags, setup.weights()) == (("weights",), ["newer"] * 2)
    await setup.model.wake(())
    assert setup.states() == [(AWAKE, 0)] * 2


async def test_no_pause_comes_between(setup):
    await setup.start()
    setup.world.hold["updateweights"] = asyncio.Event()
    updating = asyncio.create_task(setup.model.update_weights("new", "keep", ""))
    while await asyncio.wait_for(setup.world.heard.get(), 10) != "1 updateweights":
        pass
    assert setup.model.state.transition == "update"
    assert setup.model.serves, "requests wait, and are not refused"
    pausing = asyncio.create_task(setup.model.pause("keep"))
    updating.cancel()  # its caller leaves
    await asyncio.gather(updating, return_exceptions=True)
    setup.world.hold["updateweights"].set()
    await asyncio.wait_for(pausing, 10)
    assert (setup.weights(), setup.states()) == (["new"] * 2, [(PAUSED, 0)] * 2)
    assert setup.transitions == [("update", ""), ("pause", "")]
