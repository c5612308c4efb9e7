"""The engine process: `python -m xllm_npu.master.engine_process`, started by `EngineClient`.

Its standard input carries one line, an `EngineInit`, and then stays open for as long as the parent lives: when it
ends, so does this process, whatever it is doing. Requests arrive on one ZeroMQ socket and news leave on another.
Ctrl-C belongs to the parent.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
import traceback

import msgspec
import zmq

from xllm_npu.config.settings import Settings
from xllm_npu.execution.child import describe, explains, follow_parent, lacks_memory, read_line, remove_directory
from xllm_npu.log import setup_logging
from xllm_npu.state.launch import EngineInit
from xllm_npu.state.messages import (
    ClientMessage,
    EngineCommand,
    EngineFailed,
    EngineMessage,
    EngineProgress,
    EngineStats,
    Shutdown,
    StepOutputs,
)

log = logging.getLogger(__name__)

IDLE_POLL_MS = 250  # also how soon an idle engine notices the death of a worker
INTEGRITY_SECONDS = 10.0  # an idle engine checks its books at most this often
SILENT_SECONDS = 0.25  # steps without news for clients: then the figures are told
CAUSE_SECONDS = 1.0  # if another rank has died, this one fails too: the parent knows, and ends it without a word
EXIT_FAILED = 1


class Channel:
    """The two sockets, seen from the engine."""

    def __init__(self, requests: str, outputs: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket, endpoint in ((self._inbox, requests), (self._outbox, outputs)):
            socket.set_hwm(0)  # what waits is bounded by max_concurrent_requests
            socket.set(zmq.IPV6, 1)
            socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)

    def send(self, message: EngineMessage) -> None:
        self._outbox.send(self._encoder.encode(message))

    def receive(self, wait: bool) -> ClientMessage | None:
        """The next message, or None; `wait` blocks for a while."""
        if wait and not self._inbox.poll(IDLE_POLL_MS):
            return None
        try:
            return self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self._context.destroy(linger=1000)


Gauges = tuple[int, int, int, bool]  # running, waiting, pages mapped, stalled


class EngineServer:
    """Feeds an engine loop from the channel until it is told to end."""

    def __init__(self, channel: Channel, loop: object) -> None:
        from xllm_npu.master.engine_loop import EngineLoop

        assert isinstance(loop, EngineLoop)
        self._channel, self._loop = channel, loop
        self._checked_at = 0.0
        self._told = self._gauges()  # as the parent knows them
        self._told_at = time.monotonic()

    def run(self) -> None:
        idle = True
        while self._take_messages(wait=idle):
            self._tell_residency()  # before a step: whoever resumes takes part in it
            if self._loop.has_work():
                idle = False
                self._tell(self._loop.step())
            elif not idle:
                idle = True
                self._became_idle()
            elif self._told != self._gauges():  # pages that nobody uses have been unmapped
                self._tell_gauges()
        self._loop.close()

    def _tell_residency(self) -> None:
        """What pauses, sleep and wake-up have come to. Requests that they ended are told first."""
        while (answer := self._loop.residency.advance()) is not None:
            pending = self._loop.scheduler.pending_outputs()
            if pending is not None:
                self._channel.send(pending)
            self._tell_gauges()  # before the answer: who hears of memory that went or came sees it in the figures
            self._channel.send(answer)

    def _take_messages(self, wait: bool) -> bool:
        """Everything that has arrived. False after Shutdown."""
        self._loop.check()
        while (message := self._channel.receive(wait)) is not None:
            wait = False
            if isinstance(message, Shutdown):
                return False
            if isinstance(message, EngineCommand):
                self._channel.send(self._loop.command(message))
            else:
                self._loop.submit(message)
        return True

    def _tell(self, outputs: StepOutputs | None) -> None:
        """News for clients; without any the figures, now and then: a long prompt has no news for many steps."""
        if outputs is not None and (outputs.keys or outputs.finished or outputs.prompts):
            told = self._told if outputs.stats is None else _told(outputs.stats)
            if told != self._told:
                self._loop.update_owned_pages()
            self._channel.send(outputs)
            self._told, self._told_at = told, time.monotonic()
        elif self._told != self._gauges() or time.monotonic() - self._told_at > SILENT_SECONDS:
            self._tell_gauges()

    def _gauges(self) -> Gauges:
        scheduler = self._loop.scheduler
        pages = scheduler.running.blocks.pool.page_stats()
        mapped = 0 if pages is None else pages.mapped
        return scheduler.running.num_running, len(scheduler.waiting), mapped, scheduler.stalled

    def _tell_gauges(self) -> None:
        stats = self._loop.scheduler.stats
        self._loop.update_gauges()
        self._told, self._told_at = _told(stats), time.monotonic()
        self._channel.send(StepOutputs(stats=stats))

    def _became_idle(self) -> None:
        scheduler = self._loop.scheduler
        self._tell_gauges()
        now = time.monotonic()
        if now - self._checked_at > INTEGRITY_SECONDS:
            self._checked_at = now
            try:
                scheduler.check_integrity()
            except AssertionError as error:
                log.error("the scheduler's books do not agree, please report this: %s", error)


def _told(stats: EngineStats) -> Gauges:
    return stats.running, stats.waiting, 0 if stats.pages is None else stats.pages.mapped, stats.stalled


class ThrottledProgress:
    """Passes on at most ten reports a second, and every stage's first and last."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stage = ""
        self._next = 0.0

    def __call__(self, report: EngineProgress) -> None:
        now = time.monotonic()
        if report.stage != self._stage or report.done >= report.total or now >= self._next:
            self._stage, self._next = report.stage, now + 0.1
            self._channel.send(report)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = read_line()
    if not line.endswith(b"\n"):  # the parent died before it had said everything, and so before it made anything
        return EXIT_FAILED
    init = msgspec.json.decode(line, type=EngineInit)
    for directory in filter(None, (init.directory, init.ledgers)):  # the parent may be slower, or on another machine
        os.makedirs(directory, mode=0o700, exist_ok=True)
    follow_parent(lambda: remove_directories(init))  # not sooner: it would be made again behind its back
    settings = Settings.model_validate_json(init.settings)
    setup_logging(settings.service.log_level, form=settings.service.log_format)
    channel = Channel(init.requests, init.outputs)
    try:
        from xllm_npu.execution.process_setup import configure_process

        configure_process(settings, sum(slot.node == init.node for slot in init.slots))  # before torch or numba load
        from xllm_npu.master.engine_loop import EngineLoop

        loop = EngineLoop.create(settings, ThrottledProgress(channel), init)
        if init.node:  # its sockets are connected; an agent that is killed together with this process leaves nothing
            remove_directory(init.directory)
        freeze_start_up()
        channel.send(loop.ready)
        EngineServer(channel, loop).run()
    except Exception as error:
        ours = explains(error)
        if not ours and settings.parallel.dp_size > 1:
            time.sleep(CAUSE_SECONDS)
        log.log(logging.DEBUG if ours else logging.ERROR, "the engine failed", exc_info=True)
        channel.send(EngineFailed(describe(error), traceback.format_exc(), ours, lacks_memory(error)))
        channel.close()
        return EXIT_FAILED
    channel.close()
    return 0


def remove_directories(init: EngineInit) -> None:
    """The parent is gone, and with it all models of its server on this machine."""
    for directory in filter(None, (init.directory, init.ledgers)):
        remove_directory(directory)


def freeze_start_up() -> None:
    """What loading left behind stays for good: the garbage collector need not look at it in every full pass."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # taking the interpreter down with all of torch in it lasts a second, in which users wait
