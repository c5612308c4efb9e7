"""`run_server(settings) -> exit code`: the HTTP process, from its socket to its last child.

The socket is open before the engine is up (requests get 503 meanwhile). A signal drains: new requests get 503,
those in flight may finish within --shutdown-timeout, then they are ended; a second Ctrl-C ends the process at
once. If the engine dies, requests in flight get their error, and the process exits with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from xllm_npu.config.settings import served_model_names
from xllm_npu.master.llm_master import EngineStatus, LLMMaster
from xllm_npu.service.admission import Admission
from xllm_npu.service.app import create_app
from xllm_npu.service.errors import unavailable
from xllm_npu.service.http_protocol import HttpProtocol
from xllm_npu.service.listener import ListenError, check_tls, listen, remove_unix_socket, url_of
from xllm_npu.service.startup_screen import StartupScreen
from xllm_npu.text.tokenizer import spare_torch

if TYPE_CHECKING:
    from xllm_npu.config.service import ServiceSettings
    from xllm_npu.config.settings import Settings

logger = logging.getLogger("xllm_npu.service")

POLL_SECONDS = 0.05  # how soon a change of the engine's status is noticed
FLUSH_SECONDS = 1.0  # for the last error bodies and frames to reach their clients
ENGINE_EXIT_SECONDS = 5.0  # for the engine to end after its last request, before it is killed
EXIT_FAILURE = 1
EXIT_SECOND_SIGINT = 130


def run_server(settings: Settings) -> int:
    """Serve until a signal or the engine's end; 0 after a signal, else 1 with one sentence on stderr."""
    try:
        sock = listen(settings.service)
    except ListenError as exc:
        return _fail(str(exc))
    try:
        check_tls(settings.service)
        spare_torch()
        return serve(LLMMaster(settings), settings, sock)
    except ListenError as exc:
        return _fail(str(exc))
    finally:
        sock.close()
        remove_unix_socket(settings.service)


def serve(master: LLMMaster, settings: Settings, sock: socket.socket) -> int:
    """`run_server` for a given master and a listening socket."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failure = runner.run(ServerLife(master, settings, sock).run())
    return 0 if failure is None else _fail(failure)


def _fail(message: str) -> int:
    print(f"xllm-npu: {message}", file=sys.stderr, flush=True)
    return EXIT_FAILURE


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: ours drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ServerLife:
    """One server from start to end."""

    def __init__(self, master: LLMMaster, settings: Settings, sock: socket.socket) -> None:
        self._master = master
        self._settings = settings
        self._sock = sock
        self._admission = Admission(master, settings.service.max_concurrent_requests)
        self._http = HttpServer(uvicorn_config(create_app(master, settings, self._admission), settings.service))
        self._stop = asyncio.Event()
        self._stop_requested = False

    async def run(self) -> str | None:
        """Why the server failed, or None after a clean end."""
        self._take_signals()
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        try:
            failure = await self._supervise(http)
            await self._end_requests(failed=failure is not None)
            if failure is None and self._master.status is EngineStatus.DEAD:
                failure = self._engine_failure()  # it died while draining
        finally:
            await self._master.shutdown(self._engine_exit_seconds())
            self._http.should_exit = True
            await asyncio.wait([http])
        return failure

    async def _supervise(self, http: asyncio.Task[None]) -> str | None:
        """Until a signal (None) or a failure (why)."""
        with StartupScreen() as screen:
            self._master.on_progress = screen.on_progress
            try:
                await self._master.start()
            except Exception as exc:
                logger.debug("start failed", exc_info=True)
                return f"The engine could not be started: {exc}"
            await self._while_status((EngineStatus.LOADING,), http)
        if self._master.status is EngineStatus.READY and self._master.info is not None:
            screen.show_ready(self._master.info, served_model_names(self._settings),
                              url_of(self._sock, self._settings.service))
        await self._while_status((EngineStatus.READY, EngineStatus.RESTARTING), http)
        if self._stop.is_set():
            return None
        if http.done():
            return f"The HTTP server stopped: {http.exception() or 'for no known reason'}"
        return self._engine_failure()

    def _engine_failure(self) -> str:
        what = "Cannot start" if self._master.info is None else "The engine stopped"
        return f"{what}: {self._master.failure or 'for no known reason'}"

    async def _while_status(self, statuses: Collection[EngineStatus], http: asyncio.Task[None]) -> None:
        while self._master.status in statuses and not self._stop.is_set() and not http.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_SECONDS)

    async def _end_requests(self, failed: bool) -> None:
        self._admission.drain()
        if failed and self._master.info is not None:
            await asyncio.sleep(FLUSH_SECONDS)  # whatever happens meanwhile: probes shall see the 503 too
        if not await self._idle_within(0 if failed else self._settings.service.shutdown_timeout):
            logger.warning("%d requests did not finish in time and are ended", self._admission.in_flight)
            self._admission.abort_all(unavailable("The server is shutting down.", "shutting_down"))
            await self._idle_within(FLUSH_SECONDS)

    async def _idle_within(self, seconds: float) -> bool:
        if not self._admission.in_flight:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._admission.idle.wait(), seconds)
        return self._admission.in_flight == 0

    def _engine_exit_seconds(self) -> float:
        # An engine that is still loading hears nothing: there is no point in waiting for it.
        return ENGINE_EXIT_SECONDS if self._master.info is not None else 0.0

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            self._admission.drain()
            self._stop.set()
            if self._admission.in_flight:
                logger.info("finishing %d requests; Ctrl-C again to stop at once", self._admission.in_flight)
        elif sig == signal.SIGINT:
            self._master.kill()
            remove_unix_socket(self._settings.service)
            os._exit(EXIT_SECOND_SIGINT)


def uvicorn_config(app: object, service: ServiceSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=HttpProtocol, ws="none", lifespan="off", interface="asgi3", log_config=None,  # type: ignore[arg-type]
        log_level="warning", access_log=service.enable_request_logging, server_header=False,
        ssl_keyfile=service.ssl_keyfile, ssl_certfile=service.ssl_certfile, ssl_ca_certs=service.ssl_ca_certs,
        ssl_cert_reqs=2 if service.ssl_ca_certs else 0,  # ssl.CERT_REQUIRED: certificates must come from the given CAs
        timeout_graceful_shutdown=1, timeout_keep_alive=65, backlog=2048)
