"""Engines of one model that pause, sleep, wake and load weights as real ones do; each checks the order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tests.support.fake_engines import READY, FakeEngine, FakeLauncher
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_group import EngineEvents, EngineGroup
from xllm_npu.master.engine_plan import EnginePlan, plan_on_one_machine
from xllm_npu.master.model_residency import ModelResidency, ResidencyEvents, ServedWeights
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

    def weights(self) -> list[str]:
        return [engine.weights for engine in self.world.engines.values()]

    @property
    def now(self) -> tuple[str, int]:
        return self.model.state.state, self.model.state.level


@contextlib.asynccontextmanager
async def resident_engines(directory: Path) -> AsyncIterator[Setup]:
    """Nothing runs yet; `start` it. At the end no engine has seen a wrong order."""
    made = Setup(directory)
    yield made
    for group in made.groups:
        group.kill()
        await group.stop(0)
    for engine in made.world.engines.values():
        engine.task.cancel()
        assert engine.failure is None, engine.failure
