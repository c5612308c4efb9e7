"""A worker process: `python -m xllm_npu.execution.worker_process`, one device of an engine that has several.

Its standard input carries one line of `WorkerInit` and then stays open for as long as its parent lives: when it ends,
so does this process, whatever it is doing. Steps arrive through shared memory or a ZeroMQ socket; readiness, signs of
life and failures leave on another. What it computes reaches the engine through the collectives of its group only.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from xllm_npu.config.settings import Settings
from xllm_npu.execution.child import describe, follow_parent, read_line, remove_directory, speaks_for_itself
from xllm_npu.execution.worker_messages import (
    WorkerAnswer,
    WorkerCheckWeights,
    WorkerFailed,
    WorkerLoadLora,
    WorkerLoadWeights,
    WorkerProfile,
    WorkerReady,
    WorkerReport,
    WorkerStatus,
    WorkerStop,
    WorkerUnloadLora,
)
from xllm_npu.log import setup_logging
from xllm_npu.state.launch import WorkerInit

log = logging.getLogger(__name__)

STATUS_SECONDS = 0.5
EXIT_FAILED = 1


class Reporter:
    """The way to the engine; one thread at a time."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(1000)  # signs of life that nobody reads are not kept for ever
        if endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(endpoint)
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, report: WorkerReport, wait: bool = True) -> None:
        with self._lock:
            if self._socket.closed:
                return
            try:
                self._socket.send(self._encoder.encode(report), 0 if wait else zmq.NOBLOCK)
            except zmq.Again:
                return  # the engine reads nothing: its own end is noticed elsewhere

    def close(self) -> None:
        with self._lock:
            self._context.destroy(linger=1000)


def _send_status(reporter: Reporter, rank: int, ended: threading.Event) -> None:
    from xllm_platform.progress import PROGRESS

    while not ended.wait(STATUS_SECONDS):
        left, entered = PROGRESS.left, PROGRESS.entered  # in this order: entered is never behind left
        reporter.send(WorkerStatus(rank=rank, entered=entered, left=left), wait=False)


def _answer(reporter: Reporter, rank: int, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # the engine decides
        log.debug("a rank's weights", exc_info=True)
        reporter.send(WorkerAnswer(rank=rank, error=describe(error)))
    else:
        reporter.send(WorkerAnswer(rank=rank))


def serve(init: WorkerInit, settings: Settings, reporter: Reporter) -> None:
    """Load, then run steps until told to stop."""
    from xllm_npu.execution.rank import Rank
    from xllm_npu.execution.shm_ring import RingReader
    from xllm_npu.execution.step_channel import StepReceiver
    from xllm_npu.execution.step_profile import ProfileError

    ring = None if init.ring is None else RingReader(init.ring.fd, init.ring.bell, init.ring.index)
    steps = StepReceiver(init.steps, ring)
    from xllm_models.weights.lora_adapter import LoraError

    from xllm_npu.execution.worker_loader import load_worker  # takes seconds, and the engine waits for who listens
    from xllm_npu.memory.worker_memory_registry import Registration, register
    from xllm_npu.memory.worker_memory_rpc import WorkerMemoryRpcServer

    rank = Rank(seed=init.seed, dp_rank=init.dp_rank, tp_rank=init.tp_rank, slot=init.slot, slots=tuple(init.world),
                rendezvous=init.rendezvous, own_rendezvous=init.own_rendezvous, ledgers=init.ledgers,
                weights=init.weights, weights_from=init.weights_from, checkpoint=init.checkpoint)
    loaded = load_worker(settings, rank, lambda _: None)
    memory = None
    if loaded.memory is not None and loaded.memory.takes_calls:
        memory = WorkerMemoryRpcServer(init.memory, loaded.memory)
        if init.memory_master:
            told = Registration(token=init.memory_token, rank=init.tp_rank, endpoint=memory.endpoint)
            register(init.memory_master, told)
    reporter.send(WorkerReady(rank=init.tp_rank, pid=os.getpid(), device=loaded.ready.device,
                              weights=loaded.ready.weight_loads[0], load_seconds=loaded.ready.load_seconds,
                              memory="" if memory is None else memory.endpoint))
    while not isinstance(step := steps.receive(), WorkerStop):
        if isinstance(step, WorkerProfile):
            try:
                loaded.worker.profile(step.directory)
            except ProfileError as error:  # rank 0 has the same to say, and somebody who listens
                log.error("no profile of rank %d: %s", init.tp_rank, error)
        elif isinstance(step, WorkerLoadLora):
            try:
                loaded.worker.load_lora(step.lora_id, step.path)
            except LoraError as error:  # likewise
                log.error("no adapter on rank %d: %s", init.tp_rank, error)
        elif isinstance(step, WorkerUnloadLora):
            loaded.worker.unload_lora(step.lora_id)
        elif isinstance(step, WorkerCheckWeights):
            assert loaded.worker.parts.updater is not None
            check = partial(loaded.worker.parts.updater.check, step.checkpoint)
            threading.Thread(target=_answer, args=(reporter, init.tp_rank, check), name="check-weights",
                             daemon=True).start()
        elif isinstance(step, WorkerLoadWeights):
            _answer(reporter, init.tp_rank, partial(loaded.worker.load_weights, step.checkpoint))
        else:
            loaded.worker.execute(step)
    if memory is not None:
        memory.close()
    loaded.worker.close()
    steps.close()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent
    line = read_line()
    if not line:
        return EXIT_FAILED
    init = msgspec.json.decode(line, type=WorkerInit)
    follow_parent(lambda: remove_directory(init.directory) if init.directory else None)
    settings = Settings.model_validate_json(init.settings)
    setup_logging(settings.service.log_level, form=settings.service.log_format)
    reporter, ended = Reporter(init.reports), threading.Event()
    try:
        from xllm_npu.execution.plugins import load_plugins
        from xllm_npu.execution.process_setup import configure_process

        here = sum(s.node == init.slot.node for s in init.world)
        configure_process(settings, here)  # before anything loads torch or numba
        load_plugins()
        threading.Thread(target=_send_status, args=(reporter, init.tp_rank, ended), name="status", daemon=True).start()
        serve(init, settings, reporter)
    except Exception as error:
        log.debug("the worker failed", exc_info=True)  # the engine says so, unless it knows of a better reason
        trace = "" if speaks_for_itself(error) else traceback.format_exc()
        reporter.send(WorkerFailed(rank=init.tp_rank, message=describe(error), traceback=trace))
        return EXIT_FAILED
    finally:
        ended.set()
        reporter.close()
    return 0


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)
