"""A model's pauses, sleep and wake-up over two engines: sockets that check what they are told, and when."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.resident_engines import RANKS, resident_engines
from xllm_npu.master.model_residency import ModelResidency, ResidencyEvents, ServedWeights
from xllm_npu.master.residency_error import ResidencyError
from xllm_npu.state.messages import (
    AWAKE,
    PAUSED,
    SLEEPING,
    TAGS,
)


@pytest.fixture
async def setup(tmp_path):
    async with resident_engines(tmp_path) as made:
        yield made


async def test_rule_67_all_pause_before_one_sleeps_and_all_wake_before_one_runs(setup):
    await setup.start()
    await setup.model.sleep(1, "wait")
    assert (setup.now, setup.model.state.tags, setup.model.state.freed_bytes) == ((SLEEPING, 1), (), 200)
    assert setup.states() == [(SLEEPING, 1)] * 2
    assert not setup.model.serves
    await setup.model.wake(())
    assert (setup.now, setup.states(), setup.model.state.tags) == ((AWAKE, 0), [(AWAKE, 0)] * 2, TAGS)
    assert setup.model.serves
    kinds = [line.split()[1] for line in setup.world.log]
    assert kinds == [k for k in ("pause", "sleep", "wake", "resume") for _ in range(2)]
    assert set(setup.model.state.last_seconds) == {"sleep", "wake"}
    assert setup.transitions == [("sleep", ""), ("wake", "")]


async def test_again_is_nothing_more(setup):
    await setup.start()
    for state, action in (
            ((SLEEPING, 1), lambda: setup.model.sleep(1, "keep")), ((AWAKE, 0), lambda: setup.model.wake(())),
            ((PAUSED, 0), lambda: setup.model.pause("keep")), ((AWAKE, 0), setup.model.resume)):
        await action()
        since, count = setup.model.state.since, len(setup.world.log)
        await action()
        assert setup.now == state
        assert setup.model.state.since == since
        assert {line.split()[1] for line in setup.world.log[count:]} <= {"pause"}
    await setup.model.wake(["weights"])
    assert setup.now == (AWAKE, 0)


async def test_tags_one_after_the_other(setup):
    await setup.start()
    for first, second in (TAGS, TAGS[::-1]):
        await setup.model.sleep(2, "abort")
        await setup.model.wake([first])
        assert (setup.now, setup.model.state.tags) == ((SLEEPING, 2), (first,))
        assert not setup.model.serves
        count = len(setup.world.log)
        await setup.model.wake([first])
        assert len(setup.world.log) == count
        await setup.model.wake([first, second])
        assert setup.world.log[count].endswith(f"wake ['{second}']"), "what is awake is left alone"
        assert (setup.now, setup.model.serves) == ((AWAKE, 0), True)
    await setup.model.sleep(1, "abort")
    await setup.model.wake(["weights"])
    await setup.model.sleep(1, "abort")
    assert (setup.now, setup.model.state.tags) == ((SLEEPING, 1), ())
    assert all(not e.tags for e in setup.world.engines.values())


async def test_deeper_sleep_and_not_less_deep(setup):
    await setup.start()
    await setup.model.sleep(1, "abort")
    await setup.model.sleep(2, "abort")
    assert (setup.now, setup.states()) == ((SLEEPING, 2), [(SLEEPING, 2)] * 2)
    await setup.model.sleep(1, "abort")
    assert (setup.now, setup.states()) == ((SLEEPING, 2), [(SLEEPING, 2)] * 2)
    with pytest.raises(ResidencyError) as refused:
        await setup.model.resume()
    assert refused.value.code == "asleep"
    await setup.model.pause("wait")
    assert setup.now == (SLEEPING, 2)
    assert [line for line in setup.world.log if "pause wait" in line] == [], "nothing can finish while asleep"


@pytest.mark.parametrize("rank", range(RANKS))
async def test_where_one_cannot_wake_the_others_sleep_again(setup, rank):
    engines = await setup.start()
    await setup.model.sleep(1, "keep")
    engines[rank].refuse.add("wake")
    for tags in ((), ("weights",), ("kv_cache",)):
        with pytest.raises(ResidencyError, match="wake is refused") as refused:
            await setup.model.wake(tags)
        assert refused.value.code == "memory"
        assert (setup.now, setup.model.state.tags) == ((SLEEPING, 1), ())
        assert all((e.state, e.tags) == (SLEEPING, set()) for e in engines)
    assert setup.transitions[-1] == ("wake", "memory")
    engines[rank].refuse.clear()
    await setup.model.wake(())
    assert setup.states() == [(AWAKE, 0)] * 2


@pytest.mark.parametrize("paused", [True, False])
async def test_where_one_cannot_sleep_the_others_wake_again(setup, paused):
    engines = await setup.start()
    engines[1].refuse.add("sleep")
    if paused:
        await setup.model.pause("keep")
    with pytest.raises(ResidencyError, match="sleep is refused") as refused:
        await setup.model.sleep(1, "keep")
    assert refused.value.code == "failed"
    assert setup.now == ((PAUSED if paused else AWAKE), 0)
    assert setup.states() == [setup.now] * 2
    assert all(e.tags == set(TAGS) for e in engines)


async def test_where_nothing_can_be_undone_a_later_wake_up_does_it(setup):
    engines = await setup.start()
    engines[0].refuse, engines[1].refuse = {"wake"}, {"sleep"}
    with pytest.raises(ResidencyError, match="sleep is refused"):
        await setup.model.sleep(2, "keep")
    assert (setup.now, setup.model.state.tags, setup.model.serves) == ((SLEEPING, 2), (), False)
    assert setup.states() == [(SLEEPING, 2), (PAUSED, 0)]
    with pytest.raises(ResidencyError, match="wake is refused"):  # and rank 1, which has all, cannot sleep
        await setup.model.wake(())
    assert setup.states() == [(SLEEPING, 2), (PAUSED, 0)]
    engines[0].refuse.clear()
    await setup.model.wake(())
    assert (setup.now, setup.states()) == ((AWAKE, 0), [(AWAKE, 0)] * 2)


async def test_new_engines_are_not_asked_what_the_old_ones_were(setup):
    """A pause waits for a search when they end."""
    engines = await setup.start()
    setup.searches.begin()
    pausing = asyncio.create_task(setup.model.pause("wait"))
    while await asyncio.wait_for(setup.world.heard.get(), 10) != "1 pause":
        pass
    engines[0].end("ended with exit code 1")
    await asyncio.wait_for(setup.ended.wait(), 10)
    await setup.start()
    count = len(setup.world.log)
    setup.searches.end()
    with pytest.raises(ResidencyError) as gone:
        await asyncio.wait_for(pausing, 10)
    assert gone.value.code == "gone"
    assert len(setup.world.log) == count
    assert setup.states() == [(AWAKE, 0)] * 2


async def test_a_sleep_that_arrives_while_waking_waits_for_it(setup):
    await setup.start()
    await setup.model.sleep(1, "keep")
    setup.world.hold["wake"] = asyncio.Event()
    waking = asyncio.create_task(setup.model.wake(()))
    while await asyncio.wait_for(setup.world.heard.get(), 10) != "1 wake":
        pass
    sleeping = asyncio.create_task(setup.model.sleep(2, "keep"))
    await asyncio.sleep(0)
    assert setup.model.state.transition == "wake"
    setup.world.hold["wake"].set()
    await asyncio.wait_for(asyncio.gather(waking, sleeping), 10)
    assert setup.states() == [(SLEEPING, 2)] * 2


@pytest.mark.parametrize("seed", range(6))
async def test_any_calls_at_once(setup, seed):
    """Engines assert that none sleeps while another runs; the calls that fail say why."""
    engines = await setup.start()
    rng, refusals = random.Random(seed), set()

    async def call() -> None:
        action = rng.choice((
            lambda: setup.model.sleep(rng.choice((1, 2)), rng.choice(("abort", "keep"))),
            lambda: setup.model.wake(rng.choice(((), ("weights",), ("kv_cache",), TAGS))),
            lambda: setup.model.update_weights(rng.choice(("old", "new")), rng.choice(("abort", "keep")), ""),
            lambda: setup.model.pause(rng.choice(("abort", "keep", "wait"))), setup.model.resume))
        try:
            await action()
        except ResidencyError as error:
            refusals.add(error.code)

    for _ in range(12):
        for engine in engines:
            engine.refuse = {k for k in ("wake", "sleep", "checkweights") if rng.random() < 0.2}
        calls = [asyncio.create_task(call()) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.5:
            await asyncio.sleep(0)
            rng.choice(calls).cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert not [o for o in outcomes if isinstance(o, Exception)], outcomes
        for engine in engines:
            engine.refuse = set()
        await setup.model.pause("keep")  # whatever a cancelled caller left behind is done then
        assert not [e.failure for e in engines if e.failure]
        states = {e.state for e in engines}
        assert states == {setup.now[0]} or (setup.now[0] == SLEEPING and states == {PAUSED, SLEEPING})
        assert max(e.level for e in engines) == setup.now[1]
        assert engines[0].tags & engines[1].tags == set(setup.model.state.tags)
        assert set(setup.weights()) == {setup.model.weights.checkpoint}
    assert refusals <= {"asleep", "memory", "failed", "checkpoint"}


async def test_a_caller_that_leaves_ends_nothing(setup):
    await setup.start()
    setup.world.hold["sleep"] = asyncio.Event()
    caller = asyncio.create_task(setup.model.sleep(1, "keep"))
    while await asyncio.wait_for(setup.world.heard.get(), 10) != "1 sleep":
        pass
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    setup.world.hold["sleep"].set()
    await setup.model.wake(())
    assert setup.states() == [(AWAKE, 0)] * 2
    assert setup.transitions == [("sleep", ""), ("wake", "")]


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_searches_are_waited_for_or_ended(setup, mode):
    """What they sent last is finished too, or ended; kept they may go on later."""
    await setup.start()
    setup.searches.begin()
    pausing = asyncio.create_task(setup.model.pause(mode))
    while await asyncio.wait_for(setup.world.heard.get(), 10) != "1 pause":
        pass
    if mode == "wait":
        assert not (await asyncio.wait({pausing}, timeout=0.05))[0]
        setup.searches.end()
    await asyncio.wait_for(pausing, 10)
    assert len(setup.world.log) == (2 if mode == "keep" else 4)


@pytest.mark.parametrize("kind", ["pause", "sleep", "wake", "resume"])
async def test_engines_that_end_in_the_middle(setup, kind):
    """The transition says so; new engines become what the old ones were when nothing was under way."""
    engines = await setup.start()
    slept = kind in ("wake", "resume")
    if slept:
        await setup.model.sleep(2, "keep")
    setup.world.hold[kind] = asyncio.Event()
    action = asyncio.create_task(setup.model.wake(()) if slept else setup.model.sleep(1, "keep"))
    while await asyncio.wait_for(setup.world.heard.get(), 10) != f"1 {kind}":
        pass
    engines[1].end("was ended by SIGKILL")
    with pytest.raises(ResidencyError, match=r"rank 1 .* was ended by SIGKILL") as gone:
        await asyncio.wait_for(action, 10)
    assert gone.value.code == "gone"
    assert setup.now == (AWAKE, 0)
    for call in (lambda: setup.model.sleep(1, "keep"), lambda: setup.model.wake(())):
        with pytest.raises(ResidencyError) as error:
            await call()
        assert error.value.code == "not_ready"
    setup.world.hold.clear()
    await setup.start()
    assert setup.model.slept == slept
    await setup.model.restore()
    assert setup.states() == [(SLEEPING, 2) if slept else (AWAKE, 0)] * 2
    assert setup.now == ((SLEEPING, 2) if slept else (AWAKE, 0))


async def test_a_paused_model_is_paused_after_a_restart(setup):
    engines = await setup.start()
    await setup.model.pause("abort")
    engines[0].end("ended with exit code 1")
    await asyncio.wait_for(setup.ended.wait(), 10)
    await setup.start()
    await setup.model.restore()
    assert setup.states() == [(PAUSED, 0)] * 2
    await setup.model.resume()
    engines = [setup.world.engines[rank] for rank in range(RANKS)]
    engines[0].end("ended with exit code 1")
    await asyncio.wait_for(setup.ended.wait(), 10)
    await setup.start()
    await setup.model.restore()
    assert setup.states() == [(AWAKE, 0)] * 2


async def test_engines_that_step_together_count_a_resume_like_requests(setup):
    engines = await setup.start(together=True)
    for _ in range(2):
        await setup.model.pause("keep")
        await setup.model.resume()
    await setup.model.sleep(1, "keep")
    await setup.model.wake(())
    await setup.model.pause("keep")  # its answers come after what was sent before
    assert [e.totals for e in engines] == [[2, 4, 6]] * 2


async def test_arguments(setup):
    await setup.start()
    for call in (lambda: setup.model.sleep(0, "keep"), lambda: setup.model.sleep(3, "keep"),
                 lambda: setup.model.sleep(1, "never"), lambda: setup.model.pause(""),
                 lambda: setup.model.wake(["weights", "kv"])):
        with pytest.raises(ResidencyError) as refused:
            await call()
        assert refused.value.code == "invalid"
    cannot = ModelResidency(lambda: setup.groups[-1], False, setup.searches, ResidencyEvents(
        lambda: None, lambda *_: None), ServedWeights("old"))
    cannot.ready = True
    with pytest.raises(ResidencyError, match="--enable-vmm-weights") as refused:
        await cannot.sleep(1, "keep")
    assert refused.value.code == "unsupported"
    await cannot.pause("keep")
    await cannot.resume()
    assert not [line for line in setup.world.log if "sleep" in line]
