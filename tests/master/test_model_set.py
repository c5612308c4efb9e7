"""A server's models from start to end, over masters without engines."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator

import pytest

from tests.service.fake_master import INFO, FakeMaster
from tests.support.short_paths import short_directory
from xllm_npu.config.load import load
from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.master.model_residency import ResidencyError
from xllm_npu.master.model_set import ModelSet, ServedModel, StartFailed, UnknownModel


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ledgers' directory is made by engines: if this process were killed before there is one, it would stay."""
    directory = short_directory()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield
    assert list(directory.iterdir()) == []


class StartingMaster(FakeMaster):
    """Loads until `loaded` is set, or dies at once for want of memory, or for another reason."""

    def __init__(self, log: list[str], name: str, *, failure: str = "", lacked_memory: bool = False,
                 loads: bool = True) -> None:
        super().__init__(status=EngineStatus.LOADING, name=name)
        self.log, self.name = log, name
        self.begun, self.loaded = asyncio.Event(), asyncio.Event()
        self._failure, self._lacks = failure, lacked_memory
        if loads:
            self.loaded.set()

    async def start(self) -> None:
        self.log.append(f"start {self.name}")
        self.begun.set()
        asyncio.create_task(self._load())  # noqa: RUF006

    async def _load(self) -> None:
        await self.loaded.wait()
        self.log.append(f"end {self.name}")
        if self._failure:
            self.status, self.failure, self.lacked_memory = EngineStatus.DEAD, self._failure, self._lacks
        else:
            self.status, self.info = EngineStatus.READY, INFO

    async def shutdown(self, timeout: float) -> None:  # noqa: ASYNC109
        self.log.append(f"shutdown {self.name} {timeout:g}")
        self.status = EngineStatus.DEAD

    def kill(self) -> None:
        self.log.append(f"kill {self.name}")


class Forking(ModelSet):
    """Its forks come from `forks`, in their order."""

    forks: list[StartingMaster]

    def _new_fork(self, parent: FakeMaster, name: str) -> FakeMaster:
        return self.forks.pop(0)


def one(log: list[str], name: str, **options: object) -> ServedModel:
    return ServedModel((name,), StartingMaster(log, name, **options))


async def test_names():
    settings = load(["a", "b", "--max-cache-size=1MiB", "--served-model-name=x,y"], {}, several_models=True)[0].models
    models = ModelSet.of_settings(settings, lambda one: FakeMaster(name=one.model.model))
    assert [model.names for model in models] == [("x",), ("y",)]
    assert models.of("y") is list(models)[1]
    assert models.of(None) is models.of("") is models.of("x") is models.first
    with pytest.raises(UnknownModel):
        models.of("a")


async def test_they_start_one_after_the_other_and_end_together():
    log: list[str] = []
    models = ModelSet([one(log, "a", loads=False), one(log, "b")])
    start = asyncio.create_task(models.start())
    await models.first.master.begun.wait()
    assert log == ["start a"]
    models.first.master.loaded.set()
    await start
    assert log == ["start a", "end a", "start b", "end b"]
    await models.shutdown(3)
    assert log[4:] == ["shutdown a 3", "shutdown b 3"]
    assert not models.alive


async def test_the_one_that_cannot_start_is_named():
    log: list[str] = []
    models = ModelSet([one(log, "a"), one(log, "b", failure="no such file."), one(log, "c")])
    with pytest.raises(StartFailed, match=r"^Cannot start \(b\): no such file\.$"):
        await models.start()
    assert "start c" not in log
    await models.shutdown(3)
    assert {"shutdown a 3", "shutdown b 0", "shutdown c 0"} <= set(log)


@pytest.mark.parametrize(("lacked_memory", "room", "tries"), [(True, 5, 3), (True, 1, 2), (False, 5, 1)])
async def test_one_that_lacks_memory_is_tried_again_while_room_is_made(lacked_memory, room, tries):
    log: list[str] = []
    left = [StartingMaster(log, "b2", failure="too little.", lacked_memory=True), StartingMaster(log, "b3")]
    needy = one(log, "b", failure="too little.", lacked_memory=lacked_memory)
    needy.new_master = lambda: left.pop(0)
    models, asked = ModelSet([one(log, "a"), needy]), []

    async def make_room(model: ServedModel, patient: bool) -> bool:
        assert patient  # those that serve already may be busy all the time
        asked.append(model)
        return len(asked) <= room

    models.make_room = make_room
    if tries == 3:
        await models.start()
        assert models.of("b").master.name == "b3"
        assert {"shutdown b 0", "shutdown b2 0"} <= set(log)
    else:
        with pytest.raises(StartFailed, match="too little"):
            await models.start()
    assert sum(line.startswith("start b") for line in log) == tries
    assert asked == [needy] * (tries if tries == 2 else tries - 1)


async def forking(log: list[str], *forks: StartingMaster) -> Forking:
    models = Forking([one(log, "a")])
    await models.start()
    models.forks = list(forks)
    return models


async def test_a_fork_that_is_asked_for_twice_is_made_once():
    log: list[str] = []
    made = StartingMaster(log, "f", loads=False)
    models = await forking(log, made)
    asks = [asyncio.create_task(models.fork("a", "f")) for _ in range(2)]
    await made.begun.wait()
    with pytest.raises(UnknownModel):
        models.of("f")
    assert models.first.in_flight == 1  # it does not count as idle
    asks[0].cancel()
    made.loaded.set()
    fork = await asks[1]
    assert fork is models.of("f") is await models.fork("a", "f")
    assert (log.count("start f"), len(models), models.first.in_flight) == (1, 2, 0)


async def test_names_of_forks_are_taken_once():
    log: list[str] = []
    models = await forking(log, StartingMaster(log, "f"))
    await models.fork("a", "f")
    for source, name in (("f", "a"), ("a", "a"), ("f", "f")):
        with pytest.raises(ResidencyError, match=f"called {name} already"):
            await models.fork(source, name)
    with pytest.raises(UnknownModel):
        await models.fork("g", "h")


@pytest.mark.parametrize(("lacked_memory", "code"), [(True, "memory"), (False, "gone")])
async def test_a_fork_that_fails_leaves_nothing_and_may_be_tried_again(lacked_memory, code):
    log: list[str] = []
    models = await forking(
        log, StartingMaster(log, "f", failure="because.", lacked_memory=lacked_memory), StartingMaster(log, "f2"))
    with pytest.raises(ResidencyError, match="because") as failed:
        await models.fork("a", "f")
    assert failed.value.code == code
    assert "shutdown f 0" in log
    assert len(models) == 1
    assert (await models.fork("a", "f")).master.name == "f2"


async def test_a_dead_fork_may_be_made_again():
    log: list[str] = []
    models = await forking(log, StartingMaster(log, "f"), StartingMaster(log, "f2"))
    fork = await models.fork("a", "f")
    fork.master.status = EngineStatus.DEAD
    assert (await models.fork("a", "f")).master.name == "f2"
    assert [model.master.name for model in models] == ["a", "f2"]
    assert "shutdown f 0" in log, "what is left of the dead one would stay"


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_end_of_the_server_ends_a_fork_that_loads(at_once):
    log: list[str] = []
    made = StartingMaster(log, "f", loads=False)
    models = await forking(log, made)
    ask = asyncio.create_task(models.fork("a", "f"))
    await made.begun.wait()
    if at_once:
        models.kill()
        assert log[-2:] == ["kill a", "kill f"]
    await models.shutdown(1)
    assert "kill f" in log
    with pytest.raises(asyncio.CancelledError):
        await ask
