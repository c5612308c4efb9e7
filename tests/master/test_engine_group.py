"""Several engines seen as one: who gets what, when they are ready, and one end for all. The engines are sockets."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from tests.support.fake_engines import READY, FakeEngine, FakeLauncher
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_group import (
    CommandFailed,
    EngineEvents,
    EngineGroup,
    EnginesGone,
    SlowestStage,
    as_one,
    disagreement,
)
from xllm_npu.master.engine_plan import EnginePlan, plan_on_one_machine
from xllm_npu.state.messages import (
    FINISH_ABORT,
    AbortRequest,
    AddRequest,
    CommandDone,
    EngineFailed,
    EngineProgress,
    EngineStats,
    Profile,
    PromptInfo,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
    StepTogether,
    WeightLoad,
    sequence_key,
)
from xllm_npu.state.sampling_params import SamplingParams


class Setup:
    def __init__(self, directory, **settings) -> None:
        self.settings = settings_from_kwargs(model="m", dp_size=2, **settings)
        self.launcher = FakeLauncher()
        self.heard: asyncio.Queue = asyncio.Queue()
        self.directory = directory / "sockets"
        plans = [EnginePlan(self.launcher, plan.init) for plan in plan_on_one_machine(self.settings, self.directory)]
        self.group = EngineGroup(self.settings, plans, self.directory, EngineEvents(
            lambda p: self.heard.put_nowait(("progress", p)), lambda r: self.heard.put_nowait(("ready", r)),
            lambda rank, o: self.heard.put_nowait(("outputs", rank, o)), lambda r: self.heard.put_nowait(("exit", r))))

    async def start(self, **ready) -> tuple[FakeEngine, FakeEngine]:
        await self.group.start()
        engines = self.launcher.engines[0], self.launcher.engines[1]
        for engine in engines:
            await engine.be_ready(msgspec.structs.replace(READY, **ready))
        assert await self.next() == ("ready", [msgspec.structs.replace(READY, **ready)] * 2)
        return engines

    async def next(self):
        return await asyncio.wait_for(self.heard.get(), 10)


@pytest.fixture
async def make(tmp_path):
    made = []

    def one(**settings) -> Setup:
        made.append(Setup(tmp_path, **settings))
        return made[-1]

    yield one
    for setup in made:
        setup.group.kill()
        await setup.group.stop(0)
        assert not setup.directory.exists()


def request(request_id: int, length: int = 4) -> AddRequest:
    return AddRequest(request_id=request_id, external_id="", prompt=np.zeros(length, np.int32).tobytes(),
                      params=SamplingParams(), arrival_time=0.0)


async def test_requests_are_spread_and_aborts_follow_them(make):
    setup = make()
    engines = await setup.start()
    for i in range(1, 5):
        setup.group.send(request(i))
    heard = [[(await engine.hear()).request_id for _ in range(2)] for engine in engines]
    assert heard == [[1, 3], [2, 4]]
    setup.group.abort(AbortRequest([sequence_key(i, 0) for i in (1, 2, 4, 99)], FINISH_ABORT))
    assert await engines[0].hear() == AbortRequest([sequence_key(1, 0)], FINISH_ABORT)
    assert await engines[1].hear() == AbortRequest([sequence_key(2, 0), sequence_key(4, 0)], FINISH_ABORT)
    for i in (2, 4):
        setup.group.end(i)
    setup.group.abort(AbortRequest([sequence_key(2, 0)], FINISH_ABORT))
    for i in (5, 6):
        setup.group.send(request(i))
    assert [(await engines[1].hear()).request_id for _ in range(2)] == [5, 6]
    for engine in engines:
        assert await engine.hears_nothing()


async def test_what_ranks_say_moves_requests(make):
    setup = make()
    engines = await setup.start()
    outputs = StepOutputs(stats=EngineStats(free_blocks=3))
    await engines[0].say(outputs)
    assert await setup.next() == ("outputs", 0, outputs)
    for i in range(1, 5):
        setup.group.send(request(i))
    assert [(await engines[1].hear()).request_id for _ in range(4)] == [1, 2, 3, 4]
    outputs = StepOutputs(prompts=[PromptInfo(i, 0) for i in range(1, 5)], stats=EngineStats(free_blocks=0))
    await engines[1].say(outputs)
    await setup.next()
    setup.group.send(request(5))
    assert (await engines[0].hear()).request_id == 5


async def test_all_hear_of_each_request_where_ranks_step_together(make):
    setup = make()
    engines = await setup.start(steps_together=True)
    for i in (1, 2, 3):
        setup.group.send(request(i))
    first = [await engines[0].hear() for _ in range(5)]
    second = [await engines[1].hear() for _ in range(4)]
    assert [getattr(m, "total_sent", None) for m in first] == [None, 1, 2, None, 3]
    assert [getattr(m, "total_sent", None) for m in second] == [1, None, 2, 3]
    assert isinstance(first[1], StepTogether)


async def test_engines_that_differ_are_refused(make):
    setup = make()
    await setup.group.start()
    for rank, dtype in ((0, "float32"), (1, "bfloat16")):
        await setup.launcher.engines[rank].say(msgspec.structs.replace(READY, dtype=dtype))
    kind, reason = await setup.next()
    assert kind == "exit"
    assert reason.startswith("The engines of ranks 0 and 1 differ in dtype: float32 and bfloat16. Give all of them")
    assert not setup.group.alive


async def test_one_that_dies_takes_the_others_along(make):
    setup = make()
    engines = await setup.start()
    engines[1].end("ended with exit code 3")
    assert await setup.next() == ("exit", "The engine process of rank 1 (pid 1) ended with exit code 3.")
    assert not engines[0].alive
    await setup.group.stop(1)
    assert setup.heard.empty(), "told once"


CLOSED = EngineFailed("RuntimeError: closed by peer", "", False)


@pytest.mark.parametrize(("first", "second", "said"), [
    (None, CLOSED, "The engine process of rank 0 (pid 0) ended badly."),
    (CLOSED, None, "The engine process of rank 1 (pid 1) ended badly."),
    (CLOSED, EngineFailed("A worker died."), "A worker died."),
    (EngineFailed("RuntimeError: bug", "", False), EngineFailed("ValueError: x", "", False),
     "The engine process of rank 0 (pid 0) failed: RuntimeError: bug"),
])
async def test_the_likeliest_cause_is_told(make, first, second, said):
    setup = make()
    engines = await setup.start(steps_together=True)
    for engine, words in zip(engines, (first, second)):
        if words is not None:
            await engine.say(words)
        engine.end("ended badly")
    assert await setup.next() == ("exit", said)
    assert setup.heard.empty()


async def test_a_clean_end_is_asked_for_first(make):
    setup = make()
    engines = await setup.start()

    async def obey(engine):
        assert isinstance(await engine.hear(), Shutdown)
        engine.end("ended with exit code 0")

    tasks = [asyncio.create_task(obey(engine)) for engine in engines]
    await asyncio.wait_for(setup.group.stop(30), 10)
    await asyncio.gather(*tasks)
    assert not setup.directory.exists()
    assert setup.heard.empty()


async def test_progress_is_that_of_the_slowest(make):
    setup = make()
    await setup.group.start()
    await setup.launcher.engines[0].say(EngineProgress("Loading weights", 1, 9))
    assert await setup.next() == ("progress", EngineProgress("Loading weights", 1, 9))


def test_slowest_stage():
    slowest, weights, warm = SlowestStage(2), "Loading weights", "Warming up"
    assert slowest.update(0, EngineProgress(weights, 1, 10)) == EngineProgress(weights, 1, 10)
    assert slowest.update(0, EngineProgress(weights, 9, 10)) == EngineProgress(weights, 9, 10)
    assert slowest.update(1, EngineProgress(weights, 2, 10)) == EngineProgress(weights, 2, 10)
    assert slowest.update(0, EngineProgress(warm, 0, 1)) is None
    assert slowest.update(1, EngineProgress(weights, 5, 10)) == EngineProgress(weights, 5, 10)
    slowest.finish(0)
    assert slowest.update(1, EngineProgress(warm, 0, 1)) == EngineProgress(warm, 0, 1)


def test_ready_as_one():
    other = msgspec.structs.replace(READY, num_kv_blocks=15, max_model_len=60, weight_bytes=1, load_seconds=3.0,
                                    device="e", kv_cache_bytes=1)
    assert disagreement([READY, other]) is None
    one = as_one([READY, other])
    assert (one.num_kv_blocks, one.max_model_len, one.weight_bytes, one.kv_cache_bytes, one.load_seconds, one.device
            ) == (15, 60, 2, 3, 3.0, "d, e")
    assert (one.engines, one.ranks) == (2, 2)
    assert as_one([READY]) == READY
    two = msgspec.structs.replace(READY, ranks=2, weight_loads=[WeightLoad(r, 1, 1.0, 1) for r in (0, 1)])
    assert [load.rank for load in as_one([two, two]).weight_loads] == [0, 1, 2, 3]
    assert "ranks 0 and 1 differ in block_size: 4 and 8" in (
        disagreement([READY, msgspec.structs.replace(READY, block_size=8)]) or "")


def test_the_plan_of_one_machine(tmp_path):
    plans = plan_on_one_machine(settings_from_kwargs(model="m", dp_size=2, tp_size=2, random_seed=3), tmp_path)
    inits = [plan.init for plan in plans]
    assert [init.dp_rank for init in inits] == [0, 1]
    assert [slot.device for slot in inits[0].slots] == [0, 1, 2, 3]
    assert len({init.requests for init in inits} | {init.outputs for init in inits}) == 4
    for name in ("seed", "slots", "rendezvous", "agreement", "directory", "settings"):
        assert getattr(inits[0], name) == getattr(inits[1], name)
    assert inits[0].seed == 3


async def test_commands(make):
    setup = make()
    first, second = await setup.start()
    for answers, failure in ((("", ""), None), (("", "No."), "No.")):
        task = asyncio.create_task(setup.group.command(ResetPrefixCache()))
        for engine, answer in zip((first, second), answers):
            assert await engine.hear() == ResetPrefixCache()
            await engine.say(CommandDone(answer))
        if failure is None:
            await task
        else:
            with pytest.raises(CommandFailed, match=failure):
                await task


async def test_a_command_ends_with_the_engines(make):
    setup = make()
    first, _ = await setup.start()
    task = asyncio.create_task(setup.group.command(Profile("/t")))
    assert await first.hear() == Profile("/t")
    setup.group.fail("It died.")
    with pytest.raises(EnginesGone, match="It died"):
        await task
    with pytest.raises(EnginesGone):
        await setup.group.command(Profile(""))
