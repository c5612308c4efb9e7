"""The ring of step messages: what is read is what was written, in order, whoever is slow."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.execution.shm_ring import SLOTS, RingReader, RingWriter


def reader_of(writer: RingWriter, index: int) -> RingReader:
    return RingReader(os.dup(writer.fd), os.dup(writer.bells[index]), index)


@given(size=st.integers(8, 64), readers=st.integers(1, 3), data=st.data())
@settings(max_examples=200, deadline=None)
def test_messages_stay_whole_until_every_reader_has_read_them(size, readers, data):
    writer = RingWriter(size, readers)
    ends = [reader_of(writer, i) for i in range(readers)]
    waiting: list[list[bytes | None]] = [[] for _ in ends]
    try:
        for _ in range(data.draw(st.integers(1, 40))):
            reader = data.draw(st.integers(-1, readers - 1))
            if reader < 0:
                message = data.draw(st.binary(min_size=1, max_size=size + 4))
                held = any(part is not None for queue in waiting for part in queue)
                placed = writer.send(message)
                assert placed or held or len(message) > size, "an empty ring takes every message that fits"
                for queue in waiting:
                    queue.append(message if placed else None)
            elif waiting[reader]:
                assert ends[reader].receive() == waiting[reader].pop(0)
    finally:
        for end in ends:
            end.close()
        writer.close()


def test_an_empty_ring_begins_again():
    writer = RingWriter(1000, 1)
    reader = reader_of(writer, 0)
    places = set()
    for i in range(10):
        assert writer.send(bytes([i]) * 12)
        places.add((writer._head - 12) % writer.size)
        assert reader.receive() == bytes([i]) * 12
    assert places == {0}, "memory that is in the caches is used again"
    reader.close()
    writer.close()


def test_a_reader_that_never_reads_is_told_of():
    writer = RingWriter(16, 2)
    reader = reader_of(writer, 0)
    for _ in range(SLOTS):
        writer.send(b"x")
        reader.receive()
    with pytest.raises(RuntimeError, match=f"has not read the last {SLOTS} steps"):
        writer.send(b"x")
    reader.close()
    writer.close()


@pytest.mark.multiprocess
def test_between_processes():
    """Another process reads, now asleep and now looking, while this one writes as fast as it can."""
    writer = RingWriter(1 << 16, 1)
    answers, answer = os.pipe()
    child = os.fork()
    if not child:
        reader = RingReader(writer.fd, writer.bells[0], 0)
        for number in range(2000):
            message = reader.receive()
            if message is None or set(message) != {number % 251} or len(message) != 1 + 37 * number % 5000:
                os._exit(1)
            os.write(answer, b".")
        os._exit(0)
    os.close(answer)
    ahead = threading.Semaphore(2)

    def hear() -> None:
        while os.read(answers, 1):
            ahead.release()

    thread = threading.Thread(target=hear)
    thread.start()
    for number in range(2000):
        if not ahead.acquire(timeout=20):
            break
        assert writer.send(bytes([number % 251]) * (1 + 37 * number % 5000))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
    os.close(answers)
    writer.close()


def test_number_of_readers():
    with pytest.raises(ValueError, match="1 to 64 readers"):
        RingWriter(16, 65)
