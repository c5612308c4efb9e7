"""The ring of step messages: what is read is what was written, whoever is slow."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.execution.shm_ring import RingReader, RingWriter


@given(size=st.integers(8, 64), readers=st.integers(1, 3), data=st.data())
@settings(max_examples=200, deadline=None)
def test_messages_stay_whole_until_every_reader_has_read_them(size, readers, data):
    writer = RingWriter(size, readers)
    ends = [RingReader(os.dup(writer.fd), i) for i in range(readers)]
    waiting: list[list[tuple[tuple[int, int], bytes]]] = [[] for _ in ends]
    try:
        for _ in range(data.draw(st.integers(1, 40))):
            reader = data.draw(st.integers(-1, readers - 1))
            if reader < 0:
                message = data.draw(st.binary(min_size=1, max_size=size + 4))
                place = writer.write(message)
                held = max((sum(len(m) for _, m in queue) for queue in waiting), default=0)
                if place is None:
                    assert held or len(message) > size, "an empty ring takes every message that fits"
                    continue
                for queue in waiting:
                    queue.append((place, message))
            elif waiting[reader]:
                place, message = waiting[reader].pop(0)
                assert ends[reader].read(*place) == message
    finally:
        for end in ends:
            end.close()
        writer.close()


def test_absent_readers_hold_nothing():
    writer = RingWriter(16, 3)
    writer.release_absent({1})
    reader = RingReader(os.dup(writer.fd), 1)
    for i in range(10):
        place = writer.write(bytes([i]) * 12)
        assert place is not None
        assert writer.write(b"x" * 12) is None, "the one reader there is has not read"
        assert reader.read(*place) == bytes([i]) * 12
    reader.close()
    writer.close()


def test_number_of_readers():
    with pytest.raises(ValueError, match="1 to 64 readers"):
        RingWriter(16, 65)
