"""Who is let in: each connection's way from Hello to Register, with a sentence for those who are not.

Counts no nodes and opens no socket: it is given frames and gives answers. What waits here is bounded, since anyone
who reaches the port can begin a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from xllm_npu.master.cluster import seal
from xllm_npu.master.cluster.messages import PROTOCOL, Challenge, Hello, Register
from xllm_npu.version import __version__

PENDING = 1024  # conversations that have begun and not led to a registration


class Refused(Exception):
    """Not let in; the message is the sentence for both sides."""


@dataclass(slots=True)
class Visitor:
    """Someone who has proved to know the secret and asks to be a node."""

    session: seal.Session
    register: Register


class Gate:
    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._sessions: dict[bytes, seal.Session] = {}  # by the connection's routing id, oldest first
        self._decoder = msgspec.msgpack.Decoder(Register)
        self._encoder = msgspec.msgpack.Encoder()

    def take(self, routing: bytes, data: bytes) -> bytes | Visitor:
        """The frame to answer with, or the visitor. Raises Refused."""
        parsed = seal.parse_frame(data)
        if parsed is None:
            raise Refused("This is the port at which an xllm-npu server's machines meet; it speaks nothing else.")
        kind, body = parsed
        try:
            if kind == seal.HELLO:
                return self._challenge(routing, msgspec.msgpack.decode(body, type=Hello))
            if kind == seal.SEALED and routing in self._sessions:
                session = self._sessions.pop(routing)
                return Visitor(session, self._decoder.decode(session.open(body)))
        except seal.SealError:
            raise Refused("The --cluster-secret differs from that of node 0: give every machine the same.") from None
        except msgspec.MsgspecError:
            pass
        raise Refused("A machine that joins has to say hello first; this message is out of place.")

    def _challenge(self, routing: bytes, hello: Hello) -> bytes:
        if hello.protocol != PROTOCOL or hello.version != __version__:
            raise Refused(f"A machine runs xllm-npu {hello.version} and node 0 runs {__version__}: "
                          "install the same version.")
        if len(hello.nonce) != seal.NONCE_BYTES:
            raise Refused("A hello without its nonce.")
        nonce = seal.new_nonce()
        while len(self._sessions) >= PENDING:
            self._sessions.pop(next(iter(self._sessions)))
        self._sessions[routing] = seal.Session(self._secret, hello.nonce, nonce, is_master=True)
        return seal.frame(seal.CHALLENGE, self._encoder.encode(Challenge(nonce=nonce)))
