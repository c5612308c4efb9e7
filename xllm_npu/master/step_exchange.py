"""Everybody's numbers to everybody, before a step: rank 0 gathers and answers, the others send and wait.

ZeroMQ between the engine processes, one round trip a step. No wait is without end: a rank that does not come within
the timeout is named; when a connection is lost, that is soon. Knows nothing of what the numbers mean but `leaving`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from xllm_npu.master.step_agreement import StepNumbers

log = logging.getLogger(__name__)

POLL_MS = 200
LOST_SECONDS = 10.0  # whoever started the processes ends them all before that if one is gone
EVENTS = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED


class StepError(RuntimeError):
    """A rank did not come; the message names it."""


class StepExchange(Protocol):
    def exchange(self, own: StepNumbers) -> Sequence[StepNumbers]:
        """Everybody's numbers by rank, own included. Raises StepError."""
        ...

    def leave(self, own: StepNumbers) -> None:
        """Tell the others that this rank comes no more; waits for nobody."""
        ...

    def close(self) -> None: ...


def connect(
    endpoint: str, rank: int, size: int, timeout: float, check: Callable[[], object] = lambda: None
) -> StepExchange:
    """`endpoint`: where rank 0 binds and the others connect, in any order. `timeout`: seconds a turn may wait.

    `check` is called while one waits; it raises if there is no point in it.
    """
    if rank == 0:
        return _Gatherer(endpoint, size, _Socket(zmq.ROUTER, timeout, check))
    # Rank 0 knows who is missing: it speaks first.
    return _Sender(endpoint, rank, _Socket(zmq.DEALER, timeout + POLL_MS / 100, check))


class _Socket:
    """A socket that knows how long it has waited and whether a connection is gone."""

    def __init__(self, kind: int, timeout: float, check: Callable[[], object]) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.set_hwm(0)  # at most a message for each rank and turn
        self.socket.set(zmq.IPV6, 1)
        self._monitor = self.socket.get_monitor_socket(EVENTS)
        self._timeout, self._check = timeout, check
        self._lost = 0  # connections

    def receive(self, began: float) -> list[bytes] | None:
        """The next message; None when the wait, which began at `began`, is over."""
        while not self.socket.poll(POLL_MS):
            self._check()
            self._read_events()
            limit = min(LOST_SECONDS, self._timeout) if self._lost > 0 else self._timeout
            if time.monotonic() - began > limit:
                return None
        return self.socket.recv_multipart()

    def _read_events(self) -> None:
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            gone = recv_monitor_message(self._monitor)["event"] == zmq.Event.DISCONNECTED
            self._lost = max(0, self._lost + (1 if gone else -1))

    def close(self) -> None:
        self.socket.disable_monitor()
        self._context.destroy(linger=1000)


class _Gatherer:
    """Rank 0."""

    def __init__(self, endpoint: str, size: int, socket: _Socket) -> None:
        self._socket = socket
        self._socket.socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.socket.bind(endpoint)
        self._others = range(1, size)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepNumbers)
        self._came: dict[int, StepNumbers] = {}  # who has come to this turn, or left for good

    def exchange(self, own: StepNumbers) -> list[StepNumbers]:
        began = time.monotonic()
        while len(self._came) < len(self._others):
            parts = self._socket.receive(began)
            if parts is None:
                missing = [rank for rank in self._others if rank not in self._came]
                raise StepError(f"Data-parallel {_name(missing)} did not come to step {own.turn} within "
                                f"{time.monotonic() - began:.0f} s.")
            self._take(parts, own.turn)
        table = [own, *(self._came[rank] for rank in self._others)]
        self._answer(table)
        self._came = {rank: numbers for rank, numbers in self._came.items() if numbers.leaving}
        return table

    def _take(self, parts: list[bytes], turn: int) -> None:
        try:
            numbers = self._decoder.decode(parts[-1])
        except msgspec.DecodeError:
            log.warning("a message that is not a rank's is ignored")
            return
        if numbers.rank in self._others and parts[0] == _identity(numbers.rank):
            assert numbers.leaving or numbers.turn == turn, "ranks count turns differently"
            self._came[numbers.rank] = numbers

    def _answer(self, table: list[StepNumbers]) -> None:
        message = self._encoder.encode(table)
        for rank in self._others:
            self._socket.socket.send_multipart([_identity(rank), message])

    def leave(self, own: StepNumbers) -> None:
        self._answer([own])

    def close(self) -> None:
        self._socket.close()


class _Sender:
    """Any other rank."""

    def __init__(self, endpoint: str, rank: int, socket: _Socket) -> None:
        self._socket = socket
        self._socket.socket.set(zmq.IDENTITY, _identity(rank))
        self._socket.socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[StepNumbers])

    def exchange(self, own: StepNumbers) -> list[StepNumbers]:
        began = time.monotonic()
        self._socket.socket.send(self._encoder.encode(own))
        parts = self._socket.receive(began)
        if parts is None:
            raise StepError(f"Data-parallel rank 0 did not answer at step {own.turn} within "
                            f"{time.monotonic() - began:.0f} s.")
        table = self._decoder.decode(parts[-1])
        assert table[0].leaving or table[0].turn == own.turn, "ranks count turns differently"
        return table

    def leave(self, own: StepNumbers) -> None:
        self._socket.socket.send(self._encoder.encode(own))

    def close(self) -> None:
        self._socket.close()


def _identity(rank: int) -> bytes:
    return b"rank-%d" % rank


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
