"""A ring of shared memory between one writer and several reading processes of the same machine, for step messages.

Anonymous memory (memfd) and one eventfd a reader, whose descriptors are handed to child processes: nothing has a name
that could be left behind. A reader is woken by the kernel once for each message, with no thread in between on either
side; that is what this is faster by than a socket. The system calls around the eventfd also order the memory that
they announce. A message lies in one piece, or, if there is no room for it, its announcement says that it comes by
another way. Each reader counts the messages it has copied, and the writer writes only where all have.
"""

from __future__ import annotations

import mmap
import os
import time

MAX_READERS = 64
SLOTS = 64  # messages announced and not yet read; an engine is at most two steps ahead
# Words of 64 bits: messages sent; messages read, by reader; begin and length of each announced message (length 0: it
# comes another way).
_SENT, _READ, _SLOTS = 0, 1, 1 + MAX_READERS
_HEADER = (_SLOTS + 2 * SLOTS) * 8
# A reader looks for the next message so long before it sleeps: waking a core takes longer than making a step.
SPIN_SECONDS = 0.0005


def _header(memory: mmap.mmap) -> memoryview:
    return memoryview(memory)[:_HEADER].cast("Q")


class RingWriter:
    """Owns the memory. `fd` and one of `bells` is what a reader is given."""

    def __init__(self, num_bytes: int, num_readers: int) -> None:
        if not 1 <= num_readers <= MAX_READERS:
            raise ValueError(f"a ring has 1 to {MAX_READERS} readers, got {num_readers}")
        self.size = num_bytes
        self.fd = os.memfd_create("xllm-npu-steps", os.MFD_CLOEXEC)
        self.bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for _ in range(num_readers)]
        os.ftruncate(self.fd, _HEADER + num_bytes)
        self._map = mmap.mmap(self.fd, _HEADER + num_bytes)
        self._words = _header(self._map)
        self._num_readers = num_readers
        self._sent = 0  # messages
        self._head = 0  # bytes of the stream written, gaps at the end of the ring included
        self._begins = [0] * SLOTS  # where in the stream each of the last messages began

    def send(self, message: bytes) -> bool:
        """Hand the message to every reader. False: there is no room for it, and they know to get it another way.

        Raises RuntimeError if a reader has left its last SLOTS messages alone.
        """
        words = self._words
        read = min(words[_READ : _READ + self._num_readers])
        if self._sent - read >= SLOTS:
            raise RuntimeError(f"a worker has not read the last {SLOTS} steps")
        held = self._head if read == self._sent else self._begins[read % SLOTS]  # by readers, from here on
        begin = self._place(len(message), held)
        slot = self._sent % SLOTS
        self._begins[slot] = self._head if begin is None else begin
        words[_SLOTS + 2 * slot] = begin or 0
        words[_SLOTS + 2 * slot + 1] = 0 if begin is None else len(message)
        if begin is not None:
            offset = _HEADER + begin % self.size
            self._map[offset : offset + len(message)] = message
            self._head = begin + len(message)
        self._sent += 1
        for bell in self.bells:
            os.eventfd_write(bell, 1)
        words[_SENT] = self._sent  # last: a reader that looks for it finds its bell rung and does not sleep
        return begin is not None

    def _place(self, length: int, held: int) -> int | None:
        """Where in the stream a message of `length` can begin when readers hold what lies from `held` to the head."""
        if not 0 < length <= self.size:
            return None
        next_round = -(-self._head // self.size) * self.size
        if held == self._head:  # nothing: begin where the memory is in use already, and in the caches
            return next_round
        begin = self._head if next_round - self._head >= length else next_round  # in one piece
        return begin if begin + length - held <= self.size else None

    def close(self) -> None:
        self._words.release()
        self._map.close()
        for fd in (self.fd, *self.bells):
            os.close(fd)


class RingReader:
    """One reader, by its index among the readers. Takes over both descriptors."""

    def __init__(self, fd: int, bell: int, index: int) -> None:
        self.size = os.fstat(fd).st_size - _HEADER
        self._map = mmap.mmap(fd, _HEADER + self.size)
        os.close(fd)  # the mapping stays
        self._bell = bell
        self._words = _header(self._map)
        self._own = _READ + index
        self._count = 0

    def receive(self) -> bytes | None:
        """A copy of the next message, waiting for it; None: the next message comes by the other way."""
        self._spin()
        os.eventfd_read(self._bell)  # waits; and what the writer wrote before it rang is seen from here on
        slot = _SLOTS + 2 * (self._count % SLOTS)
        begin, length = self._words[slot], self._words[slot + 1]
        offset = _HEADER + begin % self.size
        message = self._map[offset : offset + length] if length else None
        self._count += 1
        self._words[self._own] = self._count
        return message

    def _spin(self) -> None:
        """Until there is a message or patience ends, leaving the core to whoever else wants it."""
        words, count = self._words, self._count
        deadline = time.monotonic() + SPIN_SECONDS
        while words[_SENT] <= count and time.monotonic() < deadline:
            os.sched_yield()

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._bell)
