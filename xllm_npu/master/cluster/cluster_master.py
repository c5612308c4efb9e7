"""The HTTP process's end of the cluster: waits for the machines, checks that they fit, and notices when one is lost.

A ZeroMQ router at --master-node-addr, on the event loop. The machines stay joined while what runs on them ends and is
started anew. Knows what to start only as lines for entry points; layout.py and plan.py decide where.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from xllm_npu.config.address import EVERY_INTERFACE, parse_address
from xllm_npu.config.settings import Settings
from xllm_npu.master.cluster import link, seal
from xllm_npu.master.cluster.gate import Gate, Refused, Visitor
from xllm_npu.master.cluster.identity import mismatch
from xllm_npu.master.cluster.messages import (
    Accepted,
    AgentMessage,
    Beat,
    End,
    Exited,
    Identity,
    Leaving,
    MasterMessage,
    Ports,
    Refusal,
    Started,
)
from xllm_npu.master.cluster.network import endpoint, free_ports, listening_address, own_address
from xllm_npu.master.cluster.node import Node

log = logging.getLogger(__name__)

SAY_SECONDS = 5.0  # between two lines about machines that are missing
END_SECONDS = 5.0  # for agents to leave when they are told to
REFUSALS = 5  # that the failure of a start quotes
WARNINGS = 20  # in SAY_SECONDS


class ClusterError(RuntimeError):
    """The machines cannot form a server; the message says which and why."""


class ClusterMaster:
    """`on_failure` hears, in a sentence, of each machine that is lost after `gather` had found them all."""

    def __init__(self, settings: Settings, identity: Identity | None, expected: Iterable[int],
                 on_failure: Callable[[str], None]) -> None:
        """`identity` None: this machine holds no rank, and the others must fit the first of them."""
        d = settings.distributed
        self._wanted = parse_address(d.master_node_addr)
        self._given_address, self._patience = d.node_addr, d.node_join_timeout
        self._identity, self._expected = identity, set(expected)
        self._on_failure = on_failure
        self._gate = Gate(d.cluster_secret or "")
        self._peers: dict[bytes, tuple[Node, seal.Session]] = {}
        self._complete = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._gathered = self._closing = False
        self._refusals: list[str] = []
        self._warned: dict[str, float] = {}  # when each was said
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)

    # Beginning

    def open(self) -> None:
        """Listen. Raises ClusterError or AddressError."""
        self._given = own_address(self._given_address) if self._given_address else ""
        self._own = listening_address(self._wanted.host)
        if self._own is None and self._wanted.host not in EVERY_INTERFACE:
            log.warning("%s is no address of this machine that others could reach: waiting at port %d of all its "
                        "interfaces", self._wanted.host, self._wanted.port)
        host = self._own or ("::" if ":" in self._wanted.host else "*")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        link.set_options(self._socket, host)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a machine that has gone fails
        try:
            self._socket.bind(endpoint(host, self._wanted.port))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ClusterError(f"--master-node-addr={self._wanted} cannot be listened on: {error.strerror}. Is another "
                               "server running there? Choose another port, the same on every machine.") from None
        monitor = self._socket.get_monitor_socket(link.EVENTS)
        self._tasks = [asyncio.create_task(self._guarded(part))
                       for part in (self._read, lambda: self._watch(monitor), self._tick)]

    async def gather(self, on_waiting: Callable[[int, int], None] = lambda joined, expected: None) -> list[Node]:
        """All expected machines, in rank order; again after some were lost, which then may come back.

        Raises ClusterError when they do not come in time.
        """
        self._gathered, until = False, time.monotonic() + self._patience
        while not self._complete.is_set():
            missing, left = self._missing(), until - time.monotonic()
            on_waiting(len(self._expected) - len(missing), len(self._expected))
            if left <= 0:
                raise ClusterError(f"{_named(missing).capitalize()} did not join at {self._wanted} within "
                                   f"{self._patience:g} s." + "".join(f" {said}" for said in self._refusals))
            log.info("waiting at %s for %s, %.0f s at most", self._wanted, _named(missing), left)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), min(SAY_SECONDS, left))
        on_waiting(len(self._expected), len(self._expected))
        self._gathered = True
        return self.nodes

    @property
    def nodes(self) -> list[Node]:
        return sorted((node for node, _ in self._peers.values()), key=lambda node: node.rank)

    @property
    def address(self) -> str:
        """This machine's literal address, as the others reach it."""
        return self._given or self._own or next((node.reached for node in self.nodes), "127.0.0.1")

    def find_ports(self, count: int) -> list[int]:
        """Free ports of this machine."""
        return free_ports(self.address, count)

    def _missing(self) -> list[int]:
        return sorted(self._expected - {node.rank for node, _ in self._peers.values()})

    # Ending

    async def close(self, failure: str = "") -> None:
        """Tell the machines to end, with everything they run, and wait for them; nothing is left then."""
        self._closing = True
        if not self._tasks:
            return
        for node, _ in list(self._peers.values()):
            self._send_to(node, End(failure))
        if self._peers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), END_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._context.destroy(linger=0)

    # Hearing

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            routing, data, peer = frames[0].bytes, frames[-1].bytes, _peer_address(frames[-1])
            if routing in self._peers:
                self._on_frame(routing, data)
                continue
            try:
                answer = self._gate.take(routing, data)
                if isinstance(answer, Visitor):
                    self._admit(routing, answer)
                else:
                    self._put(routing, answer)
            except Refused as refused:
                self._refuse(routing, f"{refused}", peer)

    def _admit(self, routing: bytes, visitor: Visitor) -> None:
        """Raises Refused."""
        register = visitor.register
        rank, known = register.node_rank, {node.rank: node for node in self.nodes}
        if self._identity is None and not known:
            self._first = register.identity
        reference = self._identity or self._first
        if (problem := mismatch(reference, register.identity, rank)) is not None:
            raise Refused(problem[0].upper() + problem[1:])
        if rank in known:
            raise Refused(f"Node {rank} has already joined, as {known[rank]}: give every machine its own --node-rank.")
        if rank not in self._expected:
            raise Refused(f"Node {rank} is not expected: --node-rank goes from {min(self._expected)} "
                          f"to {max(self._expected)}, with 0 for the machine that serves HTTP.")
        if self._closing:
            raise Refused("The server is ending.")
        node = Node(register, lambda message: self._send_to(node, message))
        self._peers[routing] = node, visitor.session
        self._all_gone.clear()
        self._send_to(node, Accepted())
        log.info("%s has joined", node)
        if not self._missing():
            self._complete.set()

    def _refuse(self, routing: bytes, sentence: str, peer: str) -> None:
        self._put(routing, seal.frame(seal.REFUSAL, self._encoder.encode(Refusal(message=sentence))))
        self._warn(f"refused {peer}: {sentence}")
        self._refusals = [*(said for said in self._refusals if said != sentence), sentence][-REFUSALS:]

    def _on_frame(self, routing: bytes, data: bytes) -> None:
        node, session = self._peers[routing]
        try:
            kind, body = seal.parse_frame(data) or (b"", b"")
            if kind != seal.SEALED:
                raise seal.SealError("not sealed")
            message = self._decoder.decode(session.open(body))
        except (seal.SealError, msgspec.MsgspecError) as error:
            return self._lose(routing, f"sent something it should not have: {error}")
        node.heard = time.monotonic()
        if isinstance(message, Started):
            node.on_started(message)
        elif isinstance(message, Exited):
            node.on_exited(message)
        elif isinstance(message, Ports):
            node.on_ports(message)
        elif isinstance(message, Leaving):
            self._lose(routing, message.reason)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._beat()  # finds out whose connection it was
            elif event in link.HANDSHAKE_FAILURES:
                self._warn(f"something that does not speak this protocol has connected to {self._wanted}")

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(link.BEAT_SECONDS)
            now = time.monotonic()
            stopped, last = max(0.0, now - last - 2 * link.BEAT_SECONDS), now  # nobody's silence but our own
            self._beat()
            for routing, (node, _) in list(self._peers.items()):
                node.heard += stopped
                if now - node.heard > link.HUNG_SECONDS:
                    self._lose(routing, f"has not answered for {link.HUNG_SECONDS:.0f} s")

    def _lose(self, routing: bytes, how: str) -> None:
        node, _ = self._peers.pop(routing)
        if not self._peers:
            self._all_gone.set()
        self._complete.clear()
        if not self._gathered:
            log.warning("%s %s; waiting for it again", node, how)
        elif not self._closing:
            self._on_failure(f"{str(node).capitalize()} {how}.")
        node.on_lost()

    def _warn(self, sentence: str) -> None:
        """Not more than once in a while: anyone who reaches the port can cause it."""
        now = time.monotonic()
        self._warned = {said: when for said, when in self._warned.items() if now - when < SAY_SECONDS}
        if sentence not in self._warned and len(self._warned) < WARNINGS:
            self._warned[sentence] = now
            log.warning("%s", sentence)

    # Saying

    def _beat(self) -> None:
        for node, _ in list(self._peers.values()):
            self._send_to(node, Beat())

    def _send_to(self, node: Node, message: MasterMessage) -> None:
        found = next((item for item in self._peers.items() if item[1][0] is node), None)
        if found is not None:
            routing, (_, session) = found
            self._put(routing, session.seal(self._encoder.encode(message)))

    def _put(self, routing: bytes, data: bytes) -> None:
        """Never blocks."""
        error = link.send_now(self._socket, [routing, data])
        if error is not None and routing in self._peers:
            self._lose(routing, "has ended or cannot be reached any more")

    async def _guarded(self, part: Callable[[], object]) -> None:
        try:
            await part()  # type: ignore[misc]
        except Exception as error:  # without it nothing would be noticed again
            log.exception("the cluster's messages cannot be handled")
            self._on_failure(f"The cluster's messages cannot be handled: {type(error).__name__}: {error}")


def _named(ranks: list[int]) -> str:
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"
