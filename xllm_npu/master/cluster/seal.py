"""Who may speak: frames of the cluster's protocol, and the seal that proves knowledge of the shared secret.

A frame is MAGIC, one letter for its kind, and a body. Both sides send a nonce first (hello, challenge); everything
after that is sealed: a counter, and an HMAC-SHA256 over direction, counter and body with a key made from the secret and
both nonces. So a frame cannot be forged, changed, replayed, reordered or sent back without the secret. Nothing is
encrypted. Without a secret the key is that of the empty one, and the seal protects from accidents only.
Knows no sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

MAGIC = b"xllm-npu\x00"
HELLO, CHALLENGE, REFUSAL, SEALED = b"H", b"C", b"R", b"S"
KINDS = (HELLO, CHALLENGE, REFUSAL, SEALED)
NONCE_BYTES = 16
_COUNTER = struct.Struct("!Q")
_MAC_BYTES = hashlib.sha256().digest_size


class SealError(ValueError):
    """The frame was not made by someone who knows the secret, or not for this place in the conversation."""


def frame(kind: bytes, body: bytes) -> bytes:
    return MAGIC + kind + body


def parse_frame(data: bytes) -> tuple[bytes, bytes] | None:
    """Kind and body; None if this is not our protocol."""
    kind = data[len(MAGIC) : len(MAGIC) + 1]
    if not data.startswith(MAGIC) or kind not in KINDS:
        return None
    return kind, data[len(MAGIC) + 1 :]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Session:
    """One side of one conversation."""

    def __init__(self, secret: str, agent_nonce: bytes, master_nonce: bytes, *, is_master: bool) -> None:
        material = b"session" + agent_nonce + master_nonce
        self._key = hmac.digest(secret.encode(), material, "sha256")
        self._mine, self._theirs = (b"m", b"a") if is_master else (b"a", b"m")
        self._sent = self._received = 0

    def seal(self, body: bytes) -> bytes:
        counter = _COUNTER.pack(self._sent)
        self._sent += 1
        return frame(SEALED, counter + self._mac(self._mine, counter, body) + body)

    def open(self, sealed: bytes) -> bytes:
        """The body of a SEALED frame's body. Raises SealError."""
        counter, rest = sealed[: _COUNTER.size], sealed[_COUNTER.size :]
        mac, body = rest[:_MAC_BYTES], rest[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._theirs, counter, body)):
            raise SealError("the seal is wrong")
        if _COUNTER.unpack(counter)[0] != self._received:
            raise SealError("a message is missing or comes again")
        self._received += 1
        return body

    def _mac(self, direction: bytes, counter: bytes, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + counter + body, "sha256")
