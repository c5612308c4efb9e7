"""A process that tries grammars out: `python -m xllm_npu.text.grammar_process`, started by `GrammarCompiler`.

A grammar from a client may take minutes to compile, gigabytes, or more stack than there is. Here that ends a process
that nobody misses. On standard input come the tokenizer and then grammars, on standard output goes one reply for each:
"" or what is wrong. A frame is its length, 4 bytes, the least significant first, and so many bytes of UTF-8; the first
is a JSON object with `tokenizer`, `vocab_size` and `eos_token_ids`, answered when its tables are built. The end of the
standard input ends the process, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import struct
import sys
import threading
from typing import BinaryIO

MEMORY_BYTES = 2 << 30  # that a grammar may take
STACK_BYTES = 1 << 20  # less than any thread has that compiles the same grammar in an engine


def read_frame(stream: BinaryIO) -> str | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    return stream.read(size).decode()


def frame(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit := pages * resource.getpagesize() + MEMORY_BYTES, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(frames: queue.SimpleQueue[str], out: BinaryIO) -> None:
    from xllm_npu.text.grammar_matcher import GrammarError, MatcherFactory

    factory: MatcherFactory | None = None
    while True:
        text, reply = frames.get(), ""
        try:
            if factory is None:
                start = json.loads(text)
                factory = MatcherFactory(start["tokenizer"], start["vocab_size"], start["eos_token_ids"])
                _bound_memory()
            else:
                factory.check(text)
        except GrammarError as error:
            reply = str(error)
        out.write(frame(reply))
        out.flush()


def main() -> None:
    frames: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(frames, sys.stdout.buffer), daemon=True)
    thread.start()
    while (text := read_frame(sys.stdin.buffer)) is not None:
        frames.put(text)
    os._exit(0)


if __name__ == "__main__":
    main()
