"""The agent of one machine: joins the master, starts and watches processes for it, and ends with it.

One conversation over one ZeroMQ connection (seal.py, messages.py). It ends when the master says so, when the master is
lost, when it refuses this machine or cannot be found in time, and when this agent is asked to stop; whichever comes
first. Nothing that was started is left then. Holds no device and loads no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from xllm_npu.config.address import Address, parse_address
from xllm_npu.config.settings import Settings
from xllm_npu.master.cluster import link, seal
from xllm_npu.master.cluster.children import Children
from xllm_npu.master.cluster.messages import (
    PROTOCOL,
    Accepted,
    AgentMessage,
    Beat,
    Challenge,
    End,
    EntryPoint,
    FindPorts,
    Hello,
    Identity,
    Kill,
    Leaving,
    MasterMessage,
    Ports,
    Refusal,
    Register,
    Start,
)
from xllm_npu.master.cluster.network import (
    AddressError,
    collective_environment,
    endpoint,
    free_ports,
    own_address,
    resolve,
    source_address,
)

log = logging.getLogger(__name__)

SAY_SECONDS = 5.0  # between two lines about a master that is not there
RECONNECT_MS = 500
LINGER_MS = 200  # for the last words of an agent that leaves
Commands = Mapping[EntryPoint, Sequence[str]]


class NodeAgent:
    """`run` is its life. `commands` are what entry points run, for tests."""

    def __init__(self, settings: Settings, identity: Identity, commands: Commands | None = None) -> None:
        d = settings.distributed
        self._settings, self._identity, self._commands = settings, identity, commands
        self._node, self._secret = d.node_rank, d.cluster_secret or ""
        self._patience = d.node_join_timeout
        self._master = parse_address(d.master_node_addr)
        self._decoder: msgspec.msgpack.Decoder[MasterMessage] = msgspec.msgpack.Decoder(MasterMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._session: seal.Session | None = None
        self._nonce = b""
        self._registered = self._joined = False
        self._hindrance = "nothing answers there"
        self._began = self._heard = self._beaten = time.monotonic()
        self._orders: set[asyncio.Task[None]] = set()
        self._children: Children | None = None

    async def run(self) -> str | None:
        """Until the end; the failure, in a sentence for people, or None if the server was asked to end."""
        self._ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._began = time.monotonic()
        context = zmq.asyncio.Context()
        tasks: list[asyncio.Task[None]] = []
        try:
            host = await self._resolved()
            if host is None:
                return await self._ended
            self._open(context, host)
            monitor = self._socket.get_monitor_socket(link.EVENTS)
            tasks = [asyncio.create_task(self._guarded(part)) for part in (self._watch(monitor), self._read(),
                                                                           self._tick())]
            self._socket.connect(self._target)
            failure = await self._ended
            assert self._children is not None
            await self._children.end(gentle=failure is None)
            return failure
        except AddressError as error:
            return str(error)
        finally:
            if self._children is not None:
                self._children.kill_all()
            for task in [*tasks, *self._orders]:
                task.cancel()
            await asyncio.gather(*tasks, *self._orders, return_exceptions=True)
            context.destroy(linger=LINGER_MS)

    def stop(self, why: str) -> None:
        """Leave: the master hears `why` ("was stopped by SIGTERM"). Call it from the event loop."""
        if self._joined:
            with contextlib.suppress(zmq.ZMQError):
                self._send(Leaving(why))
        self._end(None)

    # Getting there

    async def _resolved(self) -> str | None:
        """The master's literal address; None if time is up."""
        said = 0.0
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(None, resolve, self._master.host)
            except AddressError as error:
                self._hindrance = str(error).rstrip(".")
            if self._give_up() or self._ended.done():
                return None
            said = self._say(said)
            await asyncio.sleep(1)

    def _open(self, context: zmq.asyncio.Context, host: str) -> None:
        given = self._settings.distributed.node_addr
        own = own_address(given) if given else ""
        self._reached = Address(host, self._master.port)
        self._own = own or source_address(self._reached)
        target = endpoint(host, self._master.port)
        self._target = f"{endpoint(own, 0)};{target.removeprefix('tcp://')}" if own else target
        self._socket = context.socket(zmq.DEALER)
        link.set_options(self._socket, host)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.IMMEDIATE, 1)
        environment = collective_environment(self._own)
        self._children = Children(self._settings, self._send_if_joined, environment, self._commands)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """What happens to the connection."""
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greet()
            elif event == zmq.EVENT_CONNECTED and not self._registered:
                self._hindrance = "something listens there that does not speak this protocol"
            elif event in link.HANDSHAKE_FAILURES:
                self._hindrance = "what listens there is no xllm-npu master"
            elif event == zmq.EVENT_DISCONNECTED:
                if self._joined:
                    return self._end(self._lost("has ended or cannot be reached any more"))
                if self._registered:
                    self._hindrance = "it closed the connection"
                self._registered, self._session = False, None

    def _greet(self) -> None:
        self._nonce, self._session = seal.new_nonce(), None
        hello = Hello(protocol=PROTOCOL, version=self._identity.version, nonce=self._nonce)
        self._put(seal.frame(seal.HELLO, self._encoder.encode(hello)))

    async def _tick(self) -> None:
        """Beats, and what takes too long."""
        said = time.monotonic()
        while True:
            await asyncio.sleep(link.BEAT_SECONDS)
            if self._joined:
                self._send(Beat())
                # Time in which this process itself was stopped does not count as the master's silence.
                self._beaten, last = time.monotonic(), self._beaten
                self._heard += max(0.0, self._beaten - last - 2 * link.BEAT_SECONDS)
                if self._beaten - self._heard > link.HUNG_SECONDS:
                    return self._end(self._lost(f"has not answered for {link.HUNG_SECONDS:.0f} s"))
            elif self._give_up():
                return
            else:
                said = self._say(said)

    def _say(self, said: float) -> float:
        """A line for people every few seconds; when the last one was."""
        now = time.monotonic()
        if now - said < SAY_SECONDS:
            return said
        left = self._patience - (now - self._began)
        log.warning("node %d waits for the master at %s: %s; giving up in %.0f s", self._node, self._master,
                    self._hindrance, left)
        return now

    def _give_up(self) -> bool:
        if time.monotonic() - self._began < self._patience:
            return False
        self._end(f"Node {self._node} did not reach the master at {self._master} within {self._patience:g} s: "
                  f"{self._hindrance}. Start node 0 there, or correct --master-node-addr.")
        return True

    # Hearing

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            parsed = seal.parse_frame(data)
            if parsed is None:
                self._hindrance = "what listens there is no xllm-npu master"
                continue
            kind, body = parsed
            if kind == seal.REFUSAL and not self._joined:
                # In the clear where there is no seal yet.
                return self._end(msgspec.msgpack.decode(body, type=Refusal).message)
            if kind == seal.CHALLENGE and self._session is None:
                self._register(msgspec.msgpack.decode(body, type=Challenge).nonce)
            elif kind == seal.SEALED and self._session is not None:
                try:
                    message = self._decoder.decode(self._session.open(body))
                except seal.SealError:
                    return self._end(f"The master at {self._master} does not know this machine's --cluster-secret: "
                                     "give every machine the same.")
                self._on_message(message)

    def _register(self, nonce: bytes) -> None:
        self._session = seal.Session(self._secret, self._nonce, nonce, is_master=False)
        self._registered, self._hindrance = True, "it does not answer"
        self._send(Register(node_rank=self._node, hostname=socket.gethostname(), address=self._own,
                            reached=self._reached.host, identity=self._identity))

    def _on_message(self, message: MasterMessage) -> None:
        assert self._children is not None
        self._heard = time.monotonic()
        if isinstance(message, Accepted):
            self._joined, self._beaten = True, self._heard
            log.info("node %d of %d has joined the master at %s, with %s", self._node, self._identity.nnodes,
                     self._master, self._own)
        elif isinstance(message, Start):
            task = asyncio.create_task(self._children.start(message))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)
        elif isinstance(message, Kill):
            self._children.kill(message.child)
        elif isinstance(message, FindPorts):
            self._send(Ports(message.order, free_ports(self._own, message.count)))
        elif isinstance(message, End):
            self._end(message.failure or None)

    # Saying

    def _send(self, message: AgentMessage) -> None:
        assert self._session is not None
        self._put(self._session.seal(self._encoder.encode(message)))

    def _send_if_joined(self, message: AgentMessage) -> None:
        if self._joined and not self._ended.done():
            self._send(message)

    def _put(self, data: bytes) -> None:
        """Never blocks. What cannot be sent is lost with its connection, which `_watch` hears of."""
        error = link.send_now(self._socket, [data])
        if error is not None and not isinstance(error, zmq.Again):
            raise error

    # Ending

    def _lost(self, how: str) -> str:
        return f"The master at {self._master} {how}: node {self._node} ends."

    def _end(self, failure: str | None) -> None:
        if not self._ended.done():
            self._ended.set_result(failure)

    async def _guarded(self, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except Exception as error:  # an agent that does not listen must not hold processes
            log.exception("the agent failed")
            self._end(f"The agent of node {self._node} failed: {type(error).__name__}: {error}")
