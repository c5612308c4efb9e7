"""A ring of shared memory between one writer and several readers, for step messages too large for a socket.

Anonymous memory (memfd) whose descriptor is handed to child processes: nothing has a name that could be left behind.
A message lies in one piece; its place travels over the socket, which also orders writing before reading. Each reader
counts the bytes it is done with, and the writer writes only where all readers are done.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

MAX_READERS = 64
_HEADER = MAX_READERS * 8


class RingWriter:
    """Owns the memory. `fd` is what readers are given."""

    def __init__(self, num_bytes: int, num_readers: int) -> None:
        if not 1 <= num_readers <= MAX_READERS:
            raise ValueError(f"a ring has 1 to {MAX_READERS} readers, got {num_readers}")
        self.size = num_bytes
        self.fd = os.memfd_create("xllm-npu-steps", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _HEADER + num_bytes)
        self._map = mmap.mmap(self.fd, _HEADER + num_bytes)
        self._done = np.frombuffer(self._map, np.uint64, num_readers)  # by reader: bytes of the stream it is done with
        self._head = 0  # bytes of the stream written, gaps at the end of the ring included

    def release_absent(self, present: set[int]) -> None:
        """Readers other than those in `present` will never come: nothing waits for them."""
        for index in range(len(self._done)):
            if index not in present:
                self._done[index] = np.iinfo(np.uint64).max

    def write(self, message: bytes) -> tuple[int, int] | None:
        """Place the message: (first byte of the stream, length); None if readers still hold the room for it."""
        length = len(message)
        if length > self.size:
            return None
        begin = self._head
        offset = begin % self.size
        if offset + length > self.size:  # in one piece: skip the rest of this round
            begin += self.size - offset
            offset = 0
        done = int(self._done.min())
        if done < self._head and begin + length - done > self.size:  # an empty ring has room wherever it stands
            return None
        self._map[_HEADER + offset : _HEADER + offset + length] = message
        self._head = begin + length
        return begin, length

    def close(self) -> None:
        del self._done
        self._map.close()
        os.close(self.fd)


class RingReader:
    """One reader's view, by its index among the readers."""

    def __init__(self, fd: int, index: int) -> None:
        self.size = os.fstat(fd).st_size - _HEADER
        self._map = mmap.mmap(fd, _HEADER + self.size)
        os.close(fd)  # the mapping stays
        self._done = np.frombuffer(self._map, np.uint64, 1, index * 8)

    def read(self, begin: int, length: int) -> bytes:
        """A copy of the message; its room may be written again afterwards."""
        offset = _HEADER + begin % self.size
        message = self._map[offset : offset + length]
        self._done[0] = begin + length
        return message

    def close(self) -> None:
        del self._done
        self._map.close()
