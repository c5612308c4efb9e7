"""An engine's other workers: the processes of its tensor-parallel ranks 1 and up.

Starts those that live on this machine (processes on others are started there and connect), sends them each step, and
watches them: a process that ends, an error it reports, and collectives that wait for ever end up in `on_failure`, with
one sentence that names the rank. Nothing of the group is left after `close`, nor when this process dies: its children
follow their standard input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from xllm_platform.progress import PROGRESS

from xllm_npu.execution.hang import RankProgress, describe_hang
from xllm_npu.execution.rank import of_rank
from xllm_npu.execution.shm_ring import RingWriter
from xllm_npu.execution.step_channel import ChannelError, StepSender
from xllm_npu.execution.step_message import StepInput
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
from xllm_npu.state.launch import EngineInit, RingPlace, WorkerInit

log = logging.getLogger(__name__)

POLL_MS = 200
STOP_SECONDS = 5.0
CONNECT_SECONDS = 120.0  # for a worker process to start, torch imported


class WorkerDied(RuntimeError):
    """A worker process is gone or stuck; the message names it and says how."""

    foreign = False  # it failed with an exception that is not ours


class WorkerGroup:
    def __init__(self, init: EngineInit, tp_size: int, collective_timeout: float, ring_bytes: int,
                 on_failure: Callable[[BaseException], None]) -> None:
        """Starts the processes. `on_failure` is called once, from a thread of the group's own."""
        self._init, self._tp_size = init, tp_size
        self._timeout, self._on_failure = collective_timeout, on_failure
        self._slots = init.slots[init.dp_rank * tp_size : (init.dp_rank + 1) * tp_size]
        near = [rank for rank in range(1, tp_size) if self._slots[rank].node == init.node]
        directory = Path(init.directory)
        self._endpoint = f"ipc://{directory}/steps-{init.dp_rank}"
        self._reports_endpoint = f"ipc://{directory}/reports-{init.dp_rank}"
        self._ring = RingWriter(ring_bytes, len(near)) if ring_bytes and near else None
        self._context = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._steps = StepSender([self._endpoint, *filter(None, [init.steps])], self._ring,
                                 far=len(near) < tp_size - 1)
        for endpoint in filter(None, (self._reports_endpoint, init.reports)):
            if endpoint.startswith("tcp://["):
                self._reports.setsockopt(zmq.IPV6, 1)
            self._reports.bind(endpoint)
        self._decoder = msgspec.msgpack.Decoder(WorkerReport)
        self._processes = {rank: self._start(rank, index) for index, rank in enumerate(near)}
        self._progress: dict[int, RankProgress] = {}
        self._ready: dict[int, WorkerReady] = {}
        self._all_ready = threading.Event()
        self._answers: queue.SimpleQueue[WorkerAnswer] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._closing = False
        self.failure: BaseException | None = None
        self.busy_since: Callable[[], float | None] = lambda: None  # when the step that runs began, monotonic
        self._watcher = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._watcher.start()

    # Starting

    def _start(self, rank: int, index: int) -> subprocess.Popen[bytes]:
        init, ring = self._init, self._ring
        place = None if ring is None else RingPlace(fd=ring.fd, bell=ring.bells[index], index=index)
        line = msgspec.json.encode(WorkerInit(
            settings=init.settings, steps=self._endpoint, reports=self._reports_endpoint, seed=init.seed,
            dp_rank=init.dp_rank, tp_rank=rank, slot=self._slots[rank], rendezvous=init.rendezvous, world=init.slots,
            own_rendezvous=init.own_rendezvous, ring=place, ledgers=init.ledgers,
            weights=of_rank(init.weights, rank), weights_from=of_rank(init.weights_from, rank),
            memory=f"ipc://{init.directory}/memory-{init.dp_rank}-{rank}",
            memory_master=init.memory_master_at, memory_token=init.memory_token, checkpoint=init.checkpoint,
        ))
        process = subprocess.Popen([sys.executable, "-m", "xllm_npu.execution.worker_process"], stdin=subprocess.PIPE,
                                   pass_fds=() if place is None else (place.fd, place.bell))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already; the watcher says how
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        return process

    def connect(self) -> None:
        """Until every worker listens for steps. Raises what went wrong instead."""
        deadline = time.monotonic() + CONNECT_SECONDS
        heard = 0
        while heard < self._tp_size - 1:
            if self.failure is not None:
                raise self.failure
            heard += self._steps.heard(POLL_MS)
            if time.monotonic() > deadline:
                raise ChannelError(f"{self._tp_size - 1 - heard} of {self._tp_size - 1} worker processes did not "
                                   f"connect within {CONNECT_SECONDS:.0f} s.")

    def wait_ready(self) -> list[WorkerReady]:
        """Until every worker has loaded. Raises what went wrong instead."""
        while not self._all_ready.wait(POLL_MS / 1000):
            if self.failure is not None:
                raise self.failure
        return [self._ready[rank] for rank in sorted(self._ready)]

    # Steps

    def send(self, step: StepInput) -> None:
        self._steps.send(step)

    def profile(self, directory: str) -> None:
        """As `WorkerClient.profile`; what goes wrong is in the workers' logs."""
        self._steps.send(WorkerProfile(directory))

    def load_lora(self, lora_id: int, path: str) -> None:
        """As `WorkerClient.load_lora`, which says for all ranks whether it came about."""
        self._steps.send(WorkerLoadLora(lora_id, path))

    def unload_lora(self, lora_id: int) -> None:
        self._steps.send(WorkerUnloadLora(lora_id))

    def ask(self, message: WorkerCheckWeights | WorkerLoadWeights) -> None:
        """Have all of them do it, after the steps sent; `answers` before the next."""
        self._steps.send(message)

    def answers(self) -> list[str]:
        """What went wrong on those ranks where something did, once all have answered. Raises how one died."""
        failed: dict[int, str] = {}
        for _ in range(self._tp_size - 1):
            answer = None
            while answer is None:
                if self.failure is not None:
                    raise self.failure
                with contextlib.suppress(queue.Empty):
                    answer = self._answers.get(timeout=POLL_MS / 1000)
            if answer.error:
                failed[answer.rank] = f"Rank {self._init.dp_rank * self._tp_size + answer.rank}: {answer.error}"
        return [failed[rank] for rank in sorted(failed)]

    def cause(self, error: BaseException) -> BaseException:
        """What made rank 0 fail with `error`: the death of another rank, if one is found within a second."""
        return self.failure if self._failed.wait(1.0) and self.failure is not None else error

    # Watching

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._reports.fileno(), select.POLLIN)
        fds = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        for fd in fds:
            poller.register(fd, select.POLLIN)
        try:
            while not self._closing and self.failure is None:
                ended = [fds[fd] for fd, _ in poller.poll(POLL_MS) if fd in fds]
                self._read_reports()
                if ended and not self._closing and self.failure is None:
                    self._fail(WorkerDied(self._death(ended[0])))
                self._check_hang()
        except Exception as error:  # without a watcher nothing would be noticed again
            log.exception("the workers cannot be watched")
            self._fail(error)
        finally:
            for fd in fds:
                os.close(fd)

    def _read_reports(self) -> None:
        while int(self._reports.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            report = self._decoder.decode(self._reports.recv())
            if isinstance(report, WorkerStatus):
                self._progress[report.rank] = RankProgress(report.entered, report.left, time.monotonic())
            elif isinstance(report, WorkerReady):
                self._ready[report.rank] = report
                if len(self._ready) == self._tp_size - 1:
                    self._all_ready.set()
            elif isinstance(report, WorkerAnswer):
                self._answers.put(report)
            else:
                self._fail_with(report)

    def _fail_with(self, report: WorkerFailed) -> None:
        error = WorkerDied(f"{self._name(report.rank)}: {report.message}")
        if report.traceback:
            error.foreign = True
            error.add_note(report.traceback)
        self._fail(error)

    def _check_hang(self) -> None:
        since = self.busy_since()
        if since is None or self.failure is not None or time.monotonic() - since < self._timeout:
            return
        own = RankProgress(PROGRESS.entered, PROGRESS.left, time.monotonic())
        first = self._init.dp_rank * self._tp_size
        found = {first + rank: self._progress.get(rank) for rank in range(1, self._tp_size)}
        self._fail(WorkerDied(describe_hang({first: own, **found}, self._timeout, time.monotonic())))

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        code = process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self._name(rank)} (pid {process.pid}) {how}."

    def _name(self, rank: int) -> str:
        return f"The worker process of rank {self._init.dp_rank * self._tp_size + rank}"

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._failed.set()
        for process in self._processes.values():  # a world without one of its ranks is of no use to the others
            process.kill()
        self._on_failure(error)

    # Ending

    def close(self, patience: float = STOP_SECONDS) -> None:
        """Ask the processes to end, wait so long, and make sure. Harmless when called twice."""
        if self._closing:
            return
        self._closing = True
        if self.failure is None:
            self._steps.send(WorkerStop())
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        deadline = time.monotonic() + (patience if self.failure is None else 0)
        for process in self._processes.values():
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self._steps.close()
        self._context.destroy(linger=0)
