"""A model's pauses, sleep and wake-up over two engines: sockets that check what they are told, and when."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from tests.support.fake_engines import READY, FakeEngine, FakeLauncher
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_group import EngineEvents, EngineGroup
from xllm_npu.master.engine_plan import EnginePlan, plan_on_one_machine
from xllm_npu.master.model_residency import ModelResidency, ResidencyEvents, ServedWeights
from xllm_npu.master.residency_error import ResidencyError
from xllm_npu.state.messages import (
    AWAKE,
    PAUSED,
    SLEEPING,
    TAGS,
    CheckWeights,
    Pause,
    Residency,
    Resume,
    Sleep,
    StepTogether,
    UpdateWeights,
    Wake,
)

RANKS = 2


class World:
    """What all engines of a test know of each other."""

    def __init__(self) -> None:
        self.engines: dict[int, ResidentEngine] = {}
        self.log: list[str] = []  # what was heard, in the order of the answers: "0 pause keep"
        self.hold: dict[str, asyncio.Event] = {}  # by kind of message: answered when it is set
        self.heard = asyncio.Queue[str]()


class ResidentEngine(FakeEngine):
    """Answers as an engine does. It asserts what makes it safe: no rank sleeps or runs while another does the other."""

    def __init__(self, line: bytes, world: World) -> None:
        super().__init__(line)
        self.world, self.rank = world, self.init.dp_rank
        world.engines[self.rank] = self
        self.state, self.level, self.tags = AWAKE, 0, set(TAGS)
        self.weights = "old"
        self.refuse: set[str] = set()  # kinds of messages; of updates also the checkpoint
        self.failure: AssertionError | None = None
        self.totals: list[int] = []
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            message = msgspec.msgpack.decode(await self.inbox.recv(), type=CLIENT)
            if isinstance(message, StepTogether):
                self.totals.append(message.total_sent)
                continue
            kind = type(message).__name__.lower()
            self.world.heard.put_nowait(f"{self.rank} {kind}")
            if kind in self.world.hold:
                await self.world.hold[kind].wait()
            self.world.log.append(" ".join([str(self.rank), kind, *map(str, msgspec.structs.astuple(message))]))
            try:
                error = self.change(message, kind)
            except AssertionError as failure:
                self.failure = failure
                self.end("has failed")
                raise
            await self.say(Residency(
                state=self.state, level=self.level, tags=[t for t in TAGS if t in self.tags], seconds=0.0,
                freed_bytes=100 if kind == "sleep" and not error else 0, error=error and f"{kind} is refused",
                reason=error))

    def change(self, message, kind: str) -> str:
        others = [e for e in self.world.engines.values() if e is not self and e.alive]
        if isinstance(message, CheckWeights):
            return "checkpoint" if kind in self.refuse else ""
        if isinstance(message, UpdateWeights):
            assert all(e.state != AWAKE for e in [self, *others]), "a rank's weights change while another runs steps"
            if message.checkpoint in self.refuse:
                return "failed"
            self.weights = message.checkpoint
            return ""
        if isinstance(message, Pause) and self.state == AWAKE:
            self.state = PAUSED
        elif isinstance(message, Resume):
            assert self.state != SLEEPING
            assert all(e.tags == set(TAGS) for e in others), "a rank runs steps while another has no memory"
            assert all(e.weights == self.weights for e in others), "ranks run steps with different weights"
            self.state = AWAKE
        elif isinstance(message, Sleep):
            assert all(e.state != AWAKE for e in [self, *others]), "a rank sleeps while another runs steps"
            if kind in self.refuse:
                return "failed"
            level = message.level if "weights" in self.tags else max(self.level, message.level)
            self.state, self.level, self.tags = SLEEPING, level, set()
        elif isinstance(message, Wake):
            if kind in self.refuse:
                return "memory"
            self.tags |= set(message.tags or TAGS)
            if self.tags == set(TAGS) and self.state == SLEEPING:
                self.state, self.level = PAUSED, 0
        return ""


CLIENT = Pause | Resume | Sleep | Wake | CheckWeights | UpdateWeights | StepTogether


class ResidentLauncher(FakeLauncher):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    async def start(self, entry, line):
        return ResidentEngine(line, self.world)


class FakeSearches:
    def __init__(self) -> None:
        self.none = asyncio.Event()
        self.none.set()

    def begin(self) -> None:
        self.none.clear()

    def end(self) -> None:
        self.none.set()

    @property
    def searching(self) -> bool:
        return not self.none.is_set()

    async def wait_searched(self) -> None:
        await self.none.wait()


class Setup:
    def __init__(self, directory) -> None:
        self.directory, self.starts = directory, 0
        self.settings = settings_from_kwargs(model="m", dp_size=RANKS)
        self.world = World()
        self.searches = FakeSearches()
        self.changes = 0
        self.transitions: list[tuple[str, str]] = []
        self.groups: list[EngineGroup] = []
        self.model = ModelResidency(lambda: self.groups[-1], True, self.searches, ResidencyEvents(
            self.on_change, lambda name, seconds, code: self.transitions.append((name, code))), ServedWeights("old"))

    def on_change(self) -> None:
        self.changes += 1

    def end(self) -> None:
        self.model.forget()
        self.ended.set()

    async def start(self, together: bool = False) -> list[ResidentEngine]:
        self.starts += 1
        self.ended = asyncio.Event()
        directory = self.directory / f"sockets-{self.starts}"
        launcher = ResidentLauncher(self.world)
        plans = [EnginePlan(launcher, plan.init) for plan in plan_on_one_machine(self.settings, directory)]
        ready = asyncio.Event()
        group = EngineGroup(self.settings, plans, directory, EngineEvents(
            lambda p: None, lambda r: ready.set(), lambda rank, o: None, lambda r: self.end()))
        self.groups.append(group)
        await group.start()
        engines = [self.world.engines[rank] for rank in range(RANKS)]
        for engine in engines:
            await engine.be_ready(msgspec.structs.replace(READY, steps_together=together))
        await asyncio.wait_for(ready.wait(), 10)
        self.model.ready = True
        return engines

    def states(self) -> list[tuple[str, int]]:
        return [(e.state, e.level) for e in self.world.engines.values()]

    @property
    def now(self) -> tuple[str, int]:
        return self.model.state.state, self.model.state.level


@pytest.fixture
async def setup(tmp_path):
    made = Setup(tmp_path)
    yield made
    for group in made.groups:
        group.kill()
        await group.stop(0)
    for engine in made.world.engines.values():
        engine.task.cancel()
        assert engine.failure is None, engine.failure


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
        assert set(weights(setup)) == {setup.model.weights.checkpoint}
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


def weights(setup) -> list[str]:
    return [engine.weights for engine in setup.world.engines.values()]


async def test_weights_are_checked_by_all_then_paused_replaced_and_resumed(setup):
    await setup.start()
    assert await setup.model.update_weights("new", "keep", "step 100") == 1
    assert weights(setup) == ["new", "new"]
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
    assert (setup.states(), weights(setup)) == ([(PAUSED, 0)] * 2, ["new"] * 2)
    await setup.model.resume()
    assert setup.states() == [(AWAKE, 0)] * 2


@pytest.mark.parametrize("rank", range(RANKS))
async def test_what_one_rank_refuses_touches_none(setup, rank):
    engines = await setup.start()
    engines[rank].refuse.add("checkweights")
    with pytest.raises(ResidencyError, match="checkweights is refused") as refused:
        await setup.model.update_weights("new", "abort", "")
    assert refused.value.code == "checkpoint"
    assert (weights(setup), setup.states()) == (["old"] * 2, [(AWAKE, 0)] * 2)
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
    assert weights(setup) == ["old"] * 2
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
    assert (setup.states(), weights(setup), setup.now) == ([(SLEEPING, 2)] * 2, ["new"] * 2, (SLEEPING, 2))
    await setup.model.wake(["weights"])
    await setup.model.update_weights("newer", "wait", "")
    assert (setup.model.state.tags, weights(setup)) == (("weights",), ["newer"] * 2)
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
    assert (weights(setup), setup.states()) == (["new"] * 2, [(PAUSED, 0)] * 2)
    assert setup.transitions == [("update", ""), ("pause", "")]
