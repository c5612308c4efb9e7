"""An engine and its workers on other machines live and end together."""

import asyncio

import pytest

from tests.support.cluster import until
from xllm_npu.master.cluster.engine_launcher import EngineLauncher, FarWorker
from xllm_npu.master.cluster.node import RemoteChild
from xllm_npu.state.launch import Slot, WorkerInit

INIT = WorkerInit(settings="", steps="", reports="", seed=0, dp_rank=0, tp_rank=1, slot=Slot(1, 0), rendezvous="",
                  world=[])


class Machine:
    """Starts processes that end when the test says so."""

    def __init__(self, refuses: bool = False) -> None:
        self.children: list[RemoteChild] = []
        self.killed: list[int] = []
        self._refuses = refuses

    async def start(self, entry: str, line: bytes) -> RemoteChild:
        if self._refuses:
            raise OSError("no room")
        number = len(self.children)
        child = RemoteChild("node 1", lambda: self.killed.append(number))
        child.on_started(100 + number)
        self.children.append(child)
        return child


async def launched(far: Machine) -> tuple:
    near, failures = Machine(), []
    launcher = EngineLauncher(near, [FarWorker(5, far, INIT)], failures.append)  # type: ignore[arg-type]
    return near, failures, await launcher.start("engine", b"")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_worker_that_is_killed_is_named_at_once():
    far = Machine()
    _, failures, _ = await launched(far)
    far.children[0].on_end("was ended by SIGKILL")
    await settle()
    assert failures == ["The worker process of rank 5 (pid 100 on node 1) was ended by SIGKILL."]


async def test_an_engine_that_knows_why_is_left_to_say_so():
    far = Machine()
    near, failures, _ = await launched(far)
    far.children[0].on_end("ended with exit code 1")
    await settle()
    near.children[0].on_end("ended with exit code 1")
    await settle()
    assert failures == []


async def test_an_engine_that_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr("xllm_npu.master.cluster.engine_launcher.ENGINE_SPEAKS_SECONDS", 0.01)
    far = Machine()
    _, failures, _ = await launched(far)
    far.children[0].on_end("ended with exit code 1", "ImportError: no torch")
    await until(lambda: failures, "the failure")
    assert failures == ["The worker process of rank 5 (pid 100 on node 1) ended with exit code 1."]
    assert "ImportError: no torch" in caplog.text


async def test_killing_the_engine_kills_its_workers():
    far = Machine()
    near, failures, engine = await launched(far)
    engine.kill()
    assert (near.killed, far.killed) == ([0], [0])
    for machine in (far, near):
        machine.children[0].on_end("was ended by SIGKILL")
    await settle()
    assert failures == []
    assert await engine.wait() == "was ended by SIGKILL"
    engine.close()


async def test_workers_are_killed_though_the_engine_is_dead():
    far = Machine()
    near, _, engine = await launched(far)
    near.children[0].on_end("was ended by SIGKILL")
    engine.kill()
    assert far.killed == [0]


async def test_a_normal_end():
    far = Machine()
    near, failures, engine = await launched(far)
    far.children[0].on_end("ended with exit code 0")
    near.children[0].on_end("ended with exit code 0")
    await settle()
    assert not engine.alive
    assert failures == []


async def test_the_engine_ends_when_a_worker_cannot_be_started():
    near = Machine()
    launcher = EngineLauncher(near, [FarWorker(5, Machine(refuses=True), INIT)], print)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no room"):
        await launcher.start("engine", b"")
    assert near.killed == [0]
