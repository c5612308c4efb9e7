"""Machines find each other, or both sides say in one sentence why they do not."""

import asyncio
import socket

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.support.cluster import IDENTITY, Machines, free_address, machines, settings_of, until
from xllm_npu.master.cluster.agent import NodeAgent
from xllm_npu.master.cluster.cluster_master import ClusterError, ClusterMaster
from xllm_npu.master.cluster.gate import PENDING, Gate, Refused
from xllm_npu.master.cluster.messages import PROTOCOL, Hello
from xllm_npu.master.cluster.seal import HELLO, frame, new_nonce
from xllm_npu.version import __version__

pytestmark = pytest.mark.multiprocess


async def test_machines_join_in_any_order():
    async with machines(nnodes=3) as made:
        identity = msgspec.structs.replace(IDENTITY, nnodes=3)
        _, second = made.agent(2, identity)  # before there is a master
        master = made.open_master(identity, (1, 2))
        seen: list[tuple[int, int]] = []
        gathering = asyncio.create_task(master.gather(lambda *counts: seen.append(counts)))
        await until(lambda: len(master.nodes) == 1, "the early machine")
        assert not gathering.done()
        _, first = made.agent(1, identity)
        nodes = await gathering
        assert [(node.rank, node.address) for node in nodes] == [(1, "127.0.0.2"), (2, "127.0.0.3")]
        assert seen[0] == (0, 2)
        assert seen[-1] == (2, 2)
        assert master.address == "127.0.0.1"
        await master.close()
        assert await first is None
        assert await second is None
        assert made.failures == []


async def refused(made: Machines, caplog: pytest.LogCaptureFixture, **agent) -> str:
    """What a machine is told, which the master says too."""
    made.open_master()
    _, task = made.agent(**agent)
    said = await task
    assert said is not None
    assert f": {said}" in caplog.text
    assert made.failures == []
    return said


async def test_a_failed_start_says_who_was_refused():
    async with machines(node_join_timeout=1) as made:
        master = made.open_master()
        _, task = made.agent(identity=other(torch="1"))
        with pytest.raises(ClusterError) as caught:
            await master.gather()
        assert str(caught.value) == f"Node 1 did not join at {made.address} within 1 s. {await task}"


def other(**fields) -> object:
    return msgspec.structs.replace(IDENTITY, **fields)


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        (other(torch="1"), "Node 1 has torch 1 and node 0 has 2: install the same version."),
        (other(platform="npu"), "Node 1 computes on platform npu and node 0 on cpu: give every machine the same"),
        (other(nnodes=4), "Node 1 has --nnodes=4 and node 0 has --nnodes=2"),
        (other(model="n"), "Node 1 has another model than node 0 (n, not m)"),
        (other(settings={"block_size": "32"}), "Node 1 has --block-size=32 and node 0 has --block-size=16"),
    ],
)
async def test_another_machine_does_not_fit(identity, said, caplog):
    async with machines() as made:
        assert said in await refused(made, caplog, identity=identity)


async def test_another_version(caplog):
    async with machines() as made:
        said = await refused(made, caplog, identity=other(version="9.9"))
        assert said == f"A machine runs xllm-npu 9.9 and node 0 runs {__version__}: install the same version."


async def test_rank_out_of_range(caplog):
    async with machines() as made:
        assert "Node 5 is not expected: --node-rank goes from 1 to 1" in await refused(made, caplog, rank=5)


@pytest.mark.parametrize(("master", "agent"), [("right", "wrong"), ("right", None), (None, "wrong")])
async def test_another_secret(master, agent, caplog):
    async with machines(cluster_secret=master) as made:
        said = await refused(made, caplog, cluster_secret=agent)
        assert said == "The --cluster-secret differs from that of node 0: give every machine the same."


async def test_the_same_secret():
    async with machines(cluster_secret="known") as made:
        master = made.open_master()
        made.agent()
        assert len(await master.gather()) == 1


async def test_the_same_rank_twice():
    async with machines() as made:
        master = made.open_master()
        _, first = made.agent(1)
        await master.gather()
        _, second = made.agent(1)
        assert "Node 1 has already joined, as node 1 (" in (await second or "")
        assert not first.done()
        assert made.failures == []


async def test_no_master():
    address = free_address()
    agent = NodeAgent(settings_of(address, 1, node_join_timeout=1), IDENTITY)
    said = await agent.run()
    assert said == (f"Node 1 did not reach the master at {address} within 1 s: nothing answers there. "
                    "Start node 0 there, or correct --master-node-addr.")


async def test_no_such_name():
    agent = NodeAgent(settings_of("nowhere.invalid:19888", 1, node_join_timeout=1), IDENTITY)
    assert "The address nowhere.invalid cannot be resolved" in (await agent.run() or "")


async def test_agent_is_stopped_while_it_waits(caplog):
    agent = NodeAgent(settings_of(free_address(), 1), IDENTITY)
    running = asyncio.create_task(agent.run())
    await until(lambda: hasattr(agent, "_socket"), "the agent to connect")
    agent.stop("was stopped by SIGTERM")
    assert await running is None


async def test_master_of_something_else():
    """A web server at the master's address."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        agent = NodeAgent(settings_of(f"127.0.0.1:{port}", 1, node_join_timeout=2), IDENTITY)
        assert "what listens there is no xllm-npu master" in (await agent.run() or "")


async def test_strangers_do_no_harm(caplog):
    async with machines() as made:
        master = made.open_master()
        host, port = made.address.split(":")
        with socket.create_connection((host, int(port))) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        await until(lambda: "does not speak this protocol" in caplog.text, "the master to notice")
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(f"tcp://{made.address}")
        await stranger.send(b"hello")
        assert b"it speaks nothing else" in await stranger.recv()
        made.agent()
        assert len(await master.gather()) == 1
        context.destroy(linger=0)
        assert "refused 127.0.0.1" in caplog.text


def test_conversations_that_lead_nowhere_are_bounded():
    gate = Gate("")
    hello = msgspec.msgpack.encode(Hello(protocol=PROTOCOL, version=__version__, nonce=new_nonce()))
    for number in range(PENDING + 100):
        gate.take(str(number).encode(), frame(HELLO, hello))
    assert len(gate._sessions) == PENDING


@pytest.mark.parametrize("data", [frame(b"S", b"x"), frame(b"H", b"x"), frame(b"C", b"x"), b"", b"\x00" * 50])
def test_out_of_place(data):
    with pytest.raises(Refused):
        Gate("").take(b"1", data)


async def test_port_is_taken():
    async with machines() as made:
        made.open_master()
        second = ClusterMaster(settings_of(made.address, 0), IDENTITY, (1,), made.on_failure)
        with pytest.raises(ClusterError, match="Choose another port"):
            second.open()


async def test_address_of_another_machine_means_all_interfaces(caplog):
    async with machines() as made:
        made.address = f"203.0.113.1:{free_address().split(':')[1]}"  # as in front of a container
        made.open_master()
        assert "is no address of this machine" in caplog.text
        made.address = made.address.replace("203.0.113.1", "127.0.0.1")
        made.agent()
        await made.master.gather()
        assert made.master.address == "127.0.0.1"  # as the first machine reached it


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 loopback")
    async with machines() as made:
        made.address = f"[::1]:{port}"
        master = made.open_master()
        made.agents.append(asyncio.create_task(NodeAgent(settings_of(made.address, 1), IDENTITY).run()))
        (node,) = await master.gather()
        assert node.address == "::1"
        assert await node.find_ports(2)
