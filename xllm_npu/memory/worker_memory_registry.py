"""Where the workers of an engine on several machines say at which endpoint each takes calls about its memory.

Rank 0 listens until all have spoken, and connects back to them. It has nothing to do with how machines join the server
(xllm_npu.master.cluster). A token that all were told at start keeps workers of other engines out; like the other
sockets between ranks this one belongs on a private network.
"""

from __future__ import annotations

import contextlib
import logging
import threading

import msgspec
import zmq

log = logging.getLogger(__name__)

REGISTER_SECONDS = 60.0
POLL_MS = 100


class RegistrationFailed(RuntimeError):
    """Rank 0 cannot be told; the message says where it was looked for."""


class Registration(msgspec.Struct, kw_only=True):
    token: str
    rank: int  # among the engine's tensor-parallel ranks
    endpoint: str


class WorkerMemoryRegistry:
    def __init__(self, endpoint: str, token: str) -> None:
        """Listens from now on, in a thread, until `close`. Raises RegistrationFailed if it cannot listen there."""
        self._token, self._found = token, dict[int, str]()
        self._decoder = msgspec.msgpack.Decoder(Registration)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        _allow_ipv6(self._socket, endpoint)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RegistrationFailed(f"Rank 0 cannot wait for the memory of the other ranks at {endpoint}: "
                                     f"{error.strerror}. Choose another --worker-memory-master-node-addr.") from None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="memory-registry", daemon=True)
        self._thread.start()

    def endpoint_of(self, rank: int) -> str:
        """Of a rank that is ready, and so has registered."""
        return self._found[rank]

    def _run(self) -> None:
        while not self._closing:
            if self._socket.poll(POLL_MS):
                self._socket.send(self._answer(self._socket.recv()))

    def _answer(self, message: bytes) -> bytes:
        """Nothing, or what is wrong."""
        with contextlib.suppress(msgspec.MsgspecError):
            told = self._decoder.decode(message)
            if told.token == self._token:
                self._found[told.rank] = told.endpoint
                return b""
        log.warning("a registration of memory was refused: it is another engine's, or none")
        return b"this is another engine"

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)


def register(master: str, registration: Registration, timeout: float = REGISTER_SECONDS) -> None:
    """Tell rank 0, at endpoint `master`. Raises RegistrationFailed."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        _allow_ipv6(socket, master)
        socket.connect(master)
        socket.send(msgspec.msgpack.encode(registration))
        if not socket.poll(int(timeout * 1000)):
            raise RegistrationFailed(f"Rank 0 did not answer at {master} (--worker-memory-master-node-addr) within "
                                     f"{timeout:g} s.")
        if problem := socket.recv():
            raise RegistrationFailed(f"Rank 0 at {master} (--worker-memory-master-node-addr) refuses this rank's "
                                     f"memory: {problem.decode(errors='replace')}.")
    finally:
        context.destroy(linger=0)


def _allow_ipv6(socket: zmq.Socket[bytes], endpoint: str) -> None:
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
