"""A worker's memory over a socket: the service in the worker's process, the client in its engine's.

ZeroMQ, msgspec structs, one call at a time. The service touches its own worker's resources and nothing else. A call
that is not answered in time raises; the coordinator then aborts, and ends the engine if that is not answered either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from xllm_npu.memory.ownership import MemoryOwnershipLost
from xllm_npu.memory.worker_memory import LONG_VERBS, MemoryCall, perform
from xllm_npu.memory.worker_resources import WorkerMemoryResources
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused

log = logging.getLogger(__name__)

CALL_SECONDS = 60.0  # a worker may be busy with a step for that long while its memory thread waits for the device
LONG_CALL_SECONDS = 3600.0  # for one that moves all weights, perhaps from a slow disk
POLL_MS = 200


class WorkerMemoryUnreachable(RuntimeError):
    """The worker did not answer, or has ended; the message says which."""


class MemoryReply(msgspec.Struct, array_like=True, kw_only=True):
    value: int = 0
    failure: str = ""  # what went wrong, for people
    refusal: str = ""  # the reason of a PageGrowthRefused
    lost: bool = False  # the failure could not be undone


class WorkerMemoryRpcServer:
    """Answers calls from a thread of its own until `close`."""

    def __init__(self, endpoint: str, resources: WorkerMemoryResources) -> None:
        self._resources = resources
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        if endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)  # with the port that a * became
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(MemoryCall)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="memory-rpc", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            if self._socket.poll(POLL_MS):
                reply = self._answer(self._decoder.decode(self._socket.recv()))
                self._socket.send(self._encoder.encode(reply))

    def _answer(self, call: MemoryCall) -> MemoryReply:
        try:
            return MemoryReply(value=perform(self._resources, call))
        except PageGrowthRefused as error:
            return MemoryReply(failure=str(error), refusal=error.reason)
        except MemoryOwnershipLost as error:
            return MemoryReply(failure=str(error), lost=True)
        except Exception as error:  # the engine decides
            log.debug("the memory call %s failed", call.verb, exc_info=True)
            return MemoryReply(failure=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)


class WorkerMemoryRpcClient:
    """A `WorkerMemory` behind an endpoint. `check` raises if the worker is known to have ended."""

    def __init__(self, endpoint: str, rank: int, check: Callable[[], None], timeout: float = CALL_SECONDS) -> None:
        self._rank, self._check, self._timeout = rank, check, timeout
        self._wait = self._deadline = 0.0  # seconds, of the call that is under way
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        if endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(endpoint)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(MemoryReply)

    def start(self, call: MemoryCall) -> None:
        self._wait = LONG_CALL_SECONDS if call.verb in LONG_VERBS else self._timeout
        self._deadline = time.monotonic() + self._wait
        try:
            self._socket.send(self._encoder.encode(call), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it owes an answer, or nobody is there
            raise WorkerMemoryUnreachable(f"The memory of rank {self._rank} takes no call: {error}") from error

    def finish(self) -> int:
        while not self._socket.poll(POLL_MS):
            self._check()
            if time.monotonic() > self._deadline:
                raise WorkerMemoryUnreachable(f"The memory of rank {self._rank} did not answer within "
                                              f"{self._wait:.0f} s.")
        reply = self._decoder.decode(self._socket.recv())
        if reply.lost:
            raise MemoryOwnershipLost(f"Rank {self._rank}: {reply.failure}")
        if reply.refusal:
            raise PageGrowthRefused(reply.refusal, f"Rank {self._rank}: {reply.failure}")
        if reply.failure:
            raise RuntimeError(f"Rank {self._rank}: {reply.failure}")
        return reply.value

    def close(self) -> None:
        self._context.destroy(linger=0)
