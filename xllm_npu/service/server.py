"""`run_server(settings of each model) -> exit code`: the HTTP process, from its socket to its last child.

The socket is open before the engines are up (requests get 503 meanwhile). A signal drains: new requests get 503,
those in flight may finish within --shutdown-timeout, then they are ended; a second Ctrl-C ends the process at
once. A model that cannot be started ends the server; of models that run, the others serve on when one dies. With
the last one, requests in flight get their error, and the process exits with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from xllm_npu.master.model_set import ModelSet, ServedModel, StartFailed
from xllm_npu.service.admin import create_admin_app
from xllm_npu.service.admission import Admission
from xllm_npu.service.app import coordinator, create_app
from xllm_npu.service.connection_limit import ConnectionLimit
from xllm_npu.service.errors import unavailable
from xllm_npu.service.http_protocol import HttpProtocol
from xllm_npu.service.listener import (
    ListenError,
    check_tls,
    listen,
    listen_admin,
    remove_unix_socket,
    tcp_url,
    url_of,
)
from xllm_npu.service.memory_trim import MemoryTrim, malloc_trim
from xllm_npu.service.startup_screen import StartupScreen
from xllm_npu.text.tokenizer import spare_torch

if TYPE_CHECKING:
    from xllm_npu.config.service import ServiceSettings
    from xllm_npu.config.settings import Settings
    from xllm_npu.state.messages import EngineProgress

logger = logging.getLogger("xllm_npu.service")

POLL_SECONDS = 0.05  # how soon a change of the engine's status is noticed
FLUSH_SECONDS = 1.0  # for the last error bodies and frames to reach their clients
ENGINE_EXIT_SECONDS = 5.0  # for the engine to end after its last request, before it is killed
MAX_ADMIN_CONNECTIONS = 64
EXIT_FAILURE = 1
EXIT_SECOND_SIGINT = 130


def run_server(models: Sequence[Settings]) -> int:
    """Serve until a signal or the engines' end; 0 after a signal, else 1 with one sentence on stderr."""
    settings = models[0]
    with contextlib.ExitStack() as at_end:
        try:
            sock = at_end.enter_context(listen(settings.service))
            at_end.callback(remove_unix_socket, settings.service)
            admin = listen_admin(settings.service)
            if admin is not None:
                at_end.enter_context(admin)
            check_tls(settings.service)
        except ListenError as exc:
            return _fail(str(exc))
        spare_torch()
        return serve(ModelSet.of_settings(models), settings, sock, admin)


def serve(models: ModelSet, settings: Settings, sock: socket.socket, admin: socket.socket | None = None) -> int:
    """`run_server` for given models and listening sockets, of the API and of the admin routes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failure = runner.run(ServerLife(models, settings, sock, admin).run())
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

    def __init__(
        self, models: ModelSet, settings: Settings, sock: socket.socket, admin: socket.socket | None = None
    ) -> None:
        self._models = models
        self._settings = settings
        service = settings.service
        self._sock, self._admin_sock = sock, admin
        self._admission = Admission(models, service.max_concurrent_requests, service.max_queued_requests)
        self._residency = coordinator(models, service)
        api = create_app(models, settings, self._admission, self._residency)
        limit = ConnectionLimit(service.max_connections, models.first.master.metrics.on_rejected)
        self._http = HttpServer(uvicorn_config(api, service, limit))
        self._admin: HttpServer | None = None
        if admin is not None:
            routes = create_admin_app(models, self._residency, service)
            self._admin = HttpServer(uvicorn_config(routes, service, ConnectionLimit(MAX_ADMIN_CONNECTIONS)))
        self._stop = asyncio.Event()
        self._stop_requested = False

    async def run(self) -> str | None:
        """Why the server failed, or None after a clean end."""
        self._take_signals()
        http = asyncio.create_task(self._serve_http())
        try:
            failure = await self._supervise(http)
            await self._end_requests(failed=failure is not None)
            if failure is None and not self._models.alive:
                failure = self._engine_failure()  # it died while draining
        finally:
            await self._models.shutdown(ENGINE_EXIT_SECONDS)
            self._end_http()
            await asyncio.wait([http])
        return failure

    async def _serve_http(self) -> None:
        """Until `_end_http`; where one listener fails, the other ends with it."""
        servers = [self._http.serve(sockets=[self._sock])]
        if self._admin is not None and self._admin_sock is not None:
            servers.append(self._admin.serve(sockets=[self._admin_sock]))
        try:
            async with asyncio.TaskGroup() as group:
                for server in servers:
                    group.create_task(server).add_done_callback(lambda _: self._end_http())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _end_http(self) -> None:
        for server in filter(None, (self._http, self._admin)):
            server.should_exit = True

    async def _supervise(self, http: asyncio.Task[None]) -> str | None:
        """Until a signal (None) or a failure (why)."""
        stopped = asyncio.create_task(self._stop.wait())
        watch = asyncio.create_task(self._residency.watch())
        trim = asyncio.create_task(MemoryTrim(malloc_trim()).run())
        start = asyncio.create_task(self._start())
        try:
            await asyncio.wait([start, stopped, http], return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                await start
                await self._while_alive(http)
        except StartFailed as error:
            return str(error)
        finally:
            for task in (start, stopped, watch, trim):
                task.cancel()
            await asyncio.gather(start, stopped, watch, trim, return_exceptions=True)
        if self._stop.is_set():
            return None
        if http.done():
            return f"The HTTP server stopped: {http.exception() or 'for no known reason'}"
        return self._engine_failure()

    async def _start(self) -> None:
        """Until all models can serve."""
        with StartupScreen() as screen:
            several = len(self._models) > 1

            def on_progress(model: ServedModel, progress: EngineProgress) -> None:
                screen.on_progress(progress, model.name if several else "")

            self._models.on_progress = on_progress
            await self._models.start()
        ready = [(model.master.info, model.names) for model in self._models if model.master.info is not None]
        service = self._settings.service
        screen.show_ready(ready, url_of(self._sock, service),
                          None if self._admin_sock is None else tcp_url(self._admin_sock, service))

    def _engine_failure(self) -> str:
        return self._models.told("The engine stopped", self._models.first, self._models.first.master.failure)

    async def _while_alive(self, http: asyncio.Task[None]) -> None:
        while self._models.alive and not self._stop.is_set() and not http.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_SECONDS)

    async def _end_requests(self, failed: bool) -> None:
        self._admission.drain()
        held = asyncio.create_task(self._models.end_held())  # it may wait for a transition that goes on
        if failed and any(model.master.info is not None for model in self._models):
            await asyncio.sleep(FLUSH_SECONDS)  # whatever happens meanwhile: probes shall see the 503 too
        if not await self._idle_within(0 if failed else self._settings.service.shutdown_timeout):
            logger.warning("%d requests did not finish in time and are ended", self._admission.in_flight)
            self._admission.abort_all(unavailable("The server is shutting down.", "shutting_down"))
            await self._idle_within(FLUSH_SECONDS)
        held.cancel()

    async def _idle_within(self, seconds: float) -> bool:
        if not self._admission.in_flight:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._admission.idle.wait(), seconds)
        return self._admission.in_flight == 0

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
            self._models.kill()
            remove_unix_socket(self._settings.service)
            os._exit(EXIT_SECOND_SIGINT)


def uvicorn_config(app: object, service: ServiceSettings, limit: ConnectionLimit) -> uvicorn.Config:
    """`limit`: of the listener's connections."""
    protocol = partial(HttpProtocol, limit=limit)
    return uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", interface="asgi3", log_config=None,  # type: ignore[arg-type]
        log_level="warning", access_log=False, server_header=False,
        ssl_keyfile=service.ssl_keyfile, ssl_certfile=service.ssl_certfile, ssl_ca_certs=service.ssl_ca_certs,
        ssl_cert_reqs=2 if service.ssl_ca_certs else 0,  # ssl.CERT_REQUIRED: certificates must come from the given CAs
        timeout_graceful_shutdown=1, timeout_keep_alive=65, backlog=2048)
