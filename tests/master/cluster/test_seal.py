"""A sealed conversation cannot be joined, changed, replayed or mirrored without the secret."""

import pytest

from xllm_npu.master.cluster.seal import SEALED, SealError, Session, frame, new_nonce, parse_frame


def pair(agent_secret: str = "s", master_secret: str = "s") -> tuple[Session, Session]:
    nonces = new_nonce(), new_nonce()
    return Session(agent_secret, *nonces, is_master=False), Session(master_secret, *nonces, is_master=True)


def body_of(data: bytes) -> bytes:
    kind, body = parse_frame(data) or pytest.fail("no frame")
    assert kind == SEALED
    return body


def test_both_ways():
    agent, master = pair()
    for word in (b"one", b"", b"three" * 1000):
        assert master.open(body_of(agent.seal(word))) == word
        assert agent.open(body_of(master.seal(word))) == word


def test_another_secret():
    agent, master = pair("s", "t")
    with pytest.raises(SealError):
        master.open(body_of(agent.seal(b"start this")))


def test_another_conversation():
    (agent, _), (_, master) = pair(), pair()
    with pytest.raises(SealError):
        master.open(body_of(agent.seal(b"start this")))


@pytest.mark.parametrize("position", [0, 7, 8, 39, 40, -1])
def test_changed(position: int):
    agent, master = pair()
    body = bytearray(body_of(agent.seal(b"start this")))
    body[position] ^= 1
    with pytest.raises(SealError):
        master.open(bytes(body))


def test_replayed_and_out_of_order():
    agent, master = pair()
    first, second = body_of(agent.seal(b"1")), body_of(agent.seal(b"2"))
    with pytest.raises(SealError):
        master.open(second)
    assert master.open(first) == b"1"
    with pytest.raises(SealError):
        master.open(first)


def test_sent_back_to_its_sender():
    agent, _ = pair()
    with pytest.raises(SealError):
        agent.open(body_of(agent.seal(b"1")))


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1", frame(b"Q", b""), b"xllm-npu"])
def test_other_protocols(data: bytes):
    assert parse_frame(data) is None


def test_truncated():
    _, master = pair()
    with pytest.raises(SealError):
        master.open(b"short")
