"""One stream of steps from an engine to its worker processes, on this machine and on others.

A step is encoded once and sent once, however many workers listen: through a ring of shared memory to the workers of
this machine, by a ZeroMQ publisher to those of other machines, and to all where there is no ring or no room in it.
Every worker gets every step, in order.
"""

from __future__ import annotations

import msgspec
import zmq

from xllm_npu.execution.shm_ring import RingReader, RingWriter
from xllm_npu.execution.step_message import StepInput
from xllm_npu.execution.worker_messages import (
    WorkerCheckWeights,
    WorkerLoadLora,
    WorkerLoadWeights,
    WorkerProfile,
    WorkerStop,
    WorkerUnloadLora,
)

StepMessage = (StepInput | WorkerProfile | WorkerLoadLora | WorkerUnloadLora | WorkerCheckWeights | WorkerLoadWeights
               | WorkerStop)
ALL, FAR = b"A", b"F"  # a message's first byte is its topic: for everybody, or for those who have no ring


class ChannelError(RuntimeError):
    """Workers did not come; the message says how many."""


class StepSender:
    """Binds `endpoints`. `ring` is for the workers of this machine; `far` says whether there are others."""

    def __init__(self, endpoints: list[str], ring: RingWriter | None, far: bool) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription is heard, not only the first of its topic
        self._socket.set_hwm(0)  # at most two steps are ever on their way
        for endpoint in endpoints:
            if endpoint.startswith("tcp://["):
                self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.bind(endpoint)
        self._ring, self._far = ring, far
        self._encoder = msgspec.msgpack.Encoder()

    def heard(self, wait_ms: int) -> int:
        """How many workers have begun to listen since the last call; waits for the first."""
        count = 0
        while self._socket.poll(wait_ms):
            count += self._socket.recv() == b"\x01" + ALL
            wait_ms = 0
        return count

    def send(self, message: StepMessage) -> None:
        data = self._encoder.encode(message)
        if self._ring is None or not self._ring.send(data):
            self._socket.send(ALL + data)
        elif self._far:
            self._socket.send(FAR + data)

    def close(self) -> None:
        self._context.destroy(linger=200)
        if self._ring is not None:
            self._ring.close()


class StepReceiver:
    def __init__(self, endpoint: str, ring: RingReader | None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        if endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(endpoint)
        if ring is None:
            self._socket.subscribe(FAR)
        self._socket.subscribe(ALL)  # last: who hears of it knows of the other
        self._ring = ring
        self._decoder = msgspec.msgpack.Decoder(StepMessage)

    def receive(self) -> StepMessage:
        """The next step; waits for it."""
        if self._ring is not None and (message := self._ring.receive()) is not None:
            return self._decoder.decode(message)
        return self._decoder.decode(memoryview(self._socket.recv())[1:])

    def close(self) -> None:
        self._context.destroy(linger=0)
        if self._ring is not None:
            self._ring.close()
