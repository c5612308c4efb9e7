"""What an agent starts ends with it, with its master, and when it is told to; and everybody hears how."""

import asyncio
import os
import signal
import sys

import msgspec
import psutil
import pytest

from tests.support.cluster import (
    FOLLOWER,
    IDENTITY,
    Machines,
    engine_line,
    machines,
    settings_of,
    until,
    worker_line,
)
from tests.support.short_paths import short_directory
from xllm_npu.config.settings import Settings
from xllm_npu.execution.device_probe import DeviceReport
from xllm_npu.master.cluster import link
from xllm_npu.master.cluster.agent import NodeAgent
from xllm_npu.master.cluster.children import localized
from xllm_npu.master.cluster.cluster import Cluster
from xllm_npu.master.cluster.cluster_master import ClusterMaster
from xllm_npu.master.cluster.identity import identify
from xllm_npu.master.cluster.messages import Beat, Start
from xllm_npu.master.cluster.node import Node, RemoteChild
from xllm_npu.state.launch import EngineInit, RingPlace, WorkerInit

pytestmark = pytest.mark.multiprocess
NOTICED = 2.0  # seconds in which the death of one has to be known to the others


async def joined(made: Machines, code: str = FOLLOWER) -> Node:
    master = made.open_master(IDENTITY)
    made.agent(1, IDENTITY, code)
    return (await master.gather())[0]


def pid_of(child: RemoteChild) -> int:
    return int(child.where.split()[1])


async def gone(*pids: int) -> None:
    def ended(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await until(lambda: all(ended(pid) for pid in pids), f"the end of {pids}")


async def test_start_kill_and_the_end_of_a_process():
    async with machines() as made:
        node = await joined(made)
        child = await node.start("worker", worker_line())
        assert child.alive
        assert child.where == f"pid {pid_of(child)} on node 1"
        child.kill()
        assert await child.wait() == "was ended by SIGKILL"
        assert not child.alive
        other = await node.start("engine", engine_line())
        os.kill(pid_of(other), signal.SIGSEGV)
        assert await other.wait() == "was ended by SIGSEGV"
        assert made.failures == []


async def test_exit_code_and_last_lines(capfd):
    async with machines() as made:
        node = await joined(made, "import sys; [print(f'line {i}', file=sys.stderr) for i in range(50)]; sys.exit(3)")
        child = await node.start("worker", worker_line())
        assert await child.wait() == "ended with exit code 3"
        assert child.last_lines.splitlines() == [f"line {i}" for i in range(30, 50)]
    assert "line 0\n" in capfd.readouterr().err  # all of it is to be seen at the agent


async def test_only_our_own_lines_start_something():
    async with machines() as made:
        node = await joined(made)
        with pytest.raises(OSError, match="could not be started"):
            await node.start("worker", b'{"settings": "{}"}')
        with pytest.raises(OSError, match="could not be started"):
            await node.start("engine", b"import os")


async def test_a_command_that_does_not_exist():
    async with machines() as made:
        made.open_master(IDENTITY)
        agent, _ = made.agent(1, IDENTITY)
        agent._commands = {"worker": ["/no/such/file"], "engine": ["/no/such/file"]}
        (node,) = await made.master.gather()
        with pytest.raises(OSError, match="a process on node 1 could not be started"):
            await node.start("worker", worker_line())


async def test_the_end_of_the_server_ends_all():
    async with machines() as made:
        node = await joined(made, "import sys, time; sys.stdin.readline(); time.sleep(1000)")  # deaf
        pids = [pid_of(await node.start("worker", worker_line())) for _ in range(2)]
        await made.master.close("The engine stopped: for a reason.")
        assert await made.agents[0] == "The engine stopped: for a reason."
        await gone(*pids)
        assert made.failures == []


async def test_a_lost_master_ends_agents(monkeypatch):
    async with machines() as made:
        node = await joined(made)
        child = await node.start("worker", worker_line())
        began = asyncio.get_running_loop().time()
        made.master._context.destroy(linger=0)  # as if it were killed: nothing is said
        for task in made.master._tasks:
            task.cancel()
        made.master._tasks = []
        said = await made.agents[0]
        assert asyncio.get_running_loop().time() - began < NOTICED
        assert said == f"The master at {made.address} has ended or cannot be reached any more: node 1 ends."
        await gone(pid_of(child))


async def test_an_agent_that_leaves_is_a_failure():
    async with machines() as made:
        master = made.open_master(IDENTITY)
        agent, task = made.agent(1, IDENTITY)
        (node,) = await master.gather()
        child = await node.start("worker", worker_line())
        agent.stop("was stopped by SIGTERM")
        await asyncio.wait_for(made.failed.wait(), NOTICED)
        (sentence,) = made.failures
        assert sentence.startswith("Node 1 (")
        assert sentence.endswith("127.0.0.2) was stopped by SIGTERM.")
        assert await child.wait() == "was lost with its machine"
        assert await task is None
        await gone(pid_of(child))
        with pytest.raises(OSError, match="is gone"):
            await node.start("worker", worker_line())
        with pytest.raises(OSError, match="is gone"):
            await node.find_ports(1)


async def test_a_machine_lost_before_all_have_come_may_come_again():
    async with machines(nnodes=3) as made:
        identity = msgspec.structs.replace(IDENTITY, nnodes=3)
        master = made.open_master(identity, (1, 2))
        gathering = asyncio.create_task(master.gather())
        agent, _ = made.agent(1, identity)
        await until(lambda: master.nodes, "the first machine")
        agent.stop("was stopped by SIGINT")
        await until(lambda: not master.nodes, "its leaving")
        made.agent(2, identity)
        made.agent(1, identity)
        assert [node.rank for node in await gathering] == [1, 2]
        assert made.failures == []


async def test_a_stopped_machine_is_noticed_and_notices():
    """SIGSTOP: it is silent, and no connection ends."""
    async with machines() as made:
        master = made.open_master(IDENTITY)
        code = ("import asyncio; from tests.support.cluster import *;"
                f"print(asyncio.run(NodeAgent(settings_of({made.address!r}, 1), IDENTITY, dummy()).run()), flush=True)")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        (node,) = await master.gather()
        child = await node.start("worker", worker_line())
        process.send_signal(signal.SIGSTOP)
        try:
            await until(made.failed.is_set, "the silence to be noticed")
            assert made.failures[0].endswith("has ended or cannot be reached any more.")
            assert await child.wait() == "was lost with its machine"
        finally:
            process.send_signal(signal.SIGCONT)
        said, _ = await process.communicate()
        assert said.decode().startswith(f"The master at {made.address} has ended or cannot be reached any more")
        await gone(pid_of(child))


async def test_a_hung_agent(monkeypatch):
    monkeypatch.setattr(link, "HUNG_SECONDS", 0.8)
    send = NodeAgent._send
    monkeypatch.setattr(NodeAgent, "_send", lambda self, m: None if isinstance(m, Beat) else send(self, m))
    async with machines() as made:
        await joined(made)
        await until(made.failed.is_set, "the hung agent to be noticed")
        assert made.failures[0].endswith("has not answered for 1 s.")


async def test_a_hung_master(monkeypatch):
    monkeypatch.setattr(link, "HUNG_SECONDS", 0.8)
    monkeypatch.setattr(ClusterMaster, "_beat", lambda self: None)
    async with machines() as made:
        await joined(made)
        said = await made.agents[0]
        assert said == f"The master at {made.address} has not answered for 1 s: node 1 ends."


async def test_started_anew_on_the_same_machines(monkeypatch, tmp_path):
    """What --restart_on_failure needs: two plans, one set of agents; a lost machine may come back."""
    devices = DeviceReport(platform="cpu", count=1, shared=True)
    monkeypatch.setattr("xllm_npu.master.cluster.cluster.probe", lambda _: devices)
    async with machines() as made:
        settings = settings_of(made.address, 0)
        settings = settings.model_copy(update={"parallel": settings.parallel.model_copy(update={"dp_size": 2})})
        cluster = Cluster(settings, made.on_failure, lambda _: None)
        identity = identify(settings, devices)
        agent, _ = made.agent(1, identity)
        plans = await cluster.plan(tmp_path)
        assert [plan.init.node for plan in plans] == [0, 1]
        first = await plans[1].launcher.start("engine", engine_line())
        first.kill()
        again = await cluster.plan(tmp_path)  # waits until that has ended
        assert not first.alive
        assert again[1].init.requests != plans[1].init.requests
        await again[1].launcher.start("engine", engine_line())
        agent.stop("was stopped by SIGTERM")
        await until(made.failed.is_set, "the loss to be noticed")
        planning = asyncio.create_task(cluster.plan(tmp_path))
        made.agent(1, identity)
        assert len(await planning) == 2
        await cluster.close()
        assert [await task for task in made.agents] == [None, None]
        assert len(made.failures) == 1


async def test_ports_are_free_and_different():
    async with machines() as made:
        node = await joined(made)
        ports = await node.find_ports(20)
        assert len(set(ports)) == 20


async def test_an_engine_gets_a_directory_that_goes_with_it(monkeypatch):
    tmp_path = short_directory()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = ("import sys, json, pathlib; told = json.loads(sys.stdin.readline())['directory'];"
            "pathlib.Path(told, 'here').touch(); sys.stdin.read()")
    async with machines() as made:
        node = await joined(made, code)
        child = await node.start("engine", engine_line())
        await until(lambda: [*tmp_path.glob("*/here")], "the engine to use it")
        (found,) = tmp_path.glob("*/here")
        assert found.parent.stat().st_mode & 0o777 == 0o700
        child.kill()
        await until(lambda: not found.parent.exists(), "the directory to go")
        assert len([*tmp_path.glob("xllm-npu-*")]) == 1, "that of the ledgers stays"
    await until(lambda: not [*tmp_path.glob("xllm-npu-*")], "that too to go")


def test_each_machine_has_its_own_paths():
    own = Settings(model={"model": "/mnt/here"}, execution={"num_threads": 3, "device_id": 4})  # type: ignore[arg-type]
    given = Settings(model={"model": "/data/there", "dtype": "float32"},  # type: ignore[arg-type]
                     execution={"device_id": 1}).model_dump_json(exclude_unset=True)  # type: ignore[arg-type]
    order = Start(0, "worker", worker_line(settings=given, ring=RingPlace(fd=7, bell=8, index=0)))
    line = localized(order, own, None, "/all")
    worker = msgspec.json.decode(line, type=WorkerInit)
    settings = Settings.model_validate_json(worker.settings)
    assert worker.ring is None
    assert (worker.ledgers, worker.directory) == ("/all", "/all")
    assert (settings.model.model, settings.model.dtype) == ("/mnt/here", "float32")
    assert (settings.execution.num_threads, settings.execution.device_id) == (3, -1)  # the slot names the device
    line = localized(Start(0, "engine", engine_line(settings=given)), own, "/mine", "/all")
    engine = msgspec.json.decode(line, type=EngineInit)
    assert (engine.directory, engine.ledgers) == ("/mine", "/all")
