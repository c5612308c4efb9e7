"""Socket options that both ends of the cluster's protocol share, and what a connection tells about itself.

ZeroMQ's own heartbeats run on its I/O threads, so a machine that is silent for LINK_SECONDS is really gone, stopped or
unreachable, however busy its Python is; a process that dies is noticed at once, because its connection ends. Beats of
the protocol itself come on top: they find a peer whose connection lives and whose program hangs.
"""

from __future__ import annotations

import asyncio
from typing import cast

import zmq
import zmq.asyncio

BEAT_SECONDS = 0.3
LINK_SECONDS = 1.5
HUNG_SECONDS = 15.0  # without a beat over a living connection
HANDSHAKE_SECONDS = 3.0  # for the other end to prove that it speaks ZeroMQ
MESSAGE_BYTES = 4 * 2**20  # a longer one ends the connection

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)  # fmt: skip
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED
for _event in HANDSHAKE_FAILURES:
    EVENTS |= _event


def set_options(socket: zmq.asyncio.Socket, host: str) -> None:
    """Before it binds or connects to the literal address `host`."""
    beat = round(BEAT_SECONDS * 1000)
    socket.set(zmq.HEARTBEAT_IVL, beat)
    socket.set(zmq.HEARTBEAT_TIMEOUT, round(LINK_SECONDS * 1000) - beat)
    socket.set(zmq.HANDSHAKE_IVL, round(HANDSHAKE_SECONDS * 1000))
    socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    socket.set(zmq.LINGER, 0)
    if ":" in host:
        socket.set(zmq.IPV6, 1)


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> BaseException | None:
    """Send without waiting; why it could not be."""
    # With NOBLOCK the result is there when the call returns.
    sent = cast("asyncio.Future[object]", socket.send_multipart(frames, zmq.NOBLOCK))
    return sent.exception()
