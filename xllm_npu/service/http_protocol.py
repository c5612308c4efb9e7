"""uvicorn's HTTP/1.1 protocol with bounds on what a client may send before a body and on how long it may take, and our
envelope for unreadable requests.

The parser keeps headers (and trailers, and chunk framing) in memory until they are whole, without a limit of its
own; a connection that sends more of it than `MAX_HEAD_BYTES` in one piece is answered 431 and closed.
Of a request `PATIENCE_BYTES`, or its rest, must arrive in `PATIENCE_SECONDS`, and as fast must an answer be taken that
fills our buffer: who is slower loses the connection, and with it the place among the requests in flight.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from xllm_npu.service.connection_limit import ConnectionLimit
from xllm_npu.service.errors import ApiError, unavailable

MAX_HEAD_BYTES = 256 * 1024
PATIENCE_SECONDS = 60.0
PATIENCE_BYTES = 16 * 1024
FULL_RETRY_SECONDS = 1  # where there are too many connections


class _FaultsOfClients(logging.LoggerAdapter):
    """What uvicorn warns of here is for the client, who is told; it must not be able to fill the disk with it."""

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.debug(msg, *args, **kwargs)


_FAULTS_OF_CLIENTS = _FaultsOfClients(logging.getLogger("uvicorn.error"), {})


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, limit: ConnectionLimit, **kwargs: Any) -> None:
        """`limit`: of the listener."""
        super().__init__(*args, **kwargs)
        self._limit = limit
        self._turned_away = False
        self.logger = _FAULTS_OF_CLIENTS  # type: ignore[assignment]
        self._head_bytes = 0  # received since the last whole header block or piece of a body
        self._progress = False
        self._answered: RequestResponseCycle | None = None  # the request that is at work; `cycle` is the last received
        self._awaited = True  # the rest of a request, or a connection's first
        self._awaited_bytes = 0  # received since the clock was set
        self._arrival: asyncio.TimerHandle | None = None
        self._departure: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._limit.exceeded_by(len(self.connections)):
            self._turn_away()
        else:
            self._await_more()

    def connection_lost(self, exc: Exception | None) -> None:
        for clock in (self._arrival, self._departure):
            if clock is not None:
                clock.cancel()
        self._leave()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    # What comes

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._turned_away:
            return
        self._progress = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._head_bytes = 0 if self._progress else self._head_bytes + len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"The request's headers exceed {MAX_HEAD_BYTES} bytes.",
                                  code="headers_too_large"))
            return
        self._awaited_bytes += len(data)
        if self._cycle_ended and self.timeout_keep_alive_task is None:
            self._awaited = True  # blank lines have stopped the clock of idle connections
        if not self._awaited:
            self._await_no_more()
        elif self._arrival is None or self._awaited_bytes >= PATIENCE_BYTES:
            self._await_more()

    def on_message_begin(self) -> None:
        self._awaited = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        self._awaited = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _await_more(self) -> None:
        self._await_no_more()
        self._arrival = self.loop.call_later(PATIENCE_SECONDS, self._on_late_arrival)

    def _await_no_more(self) -> None:
        self._awaited_bytes = 0
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _on_late_arrival(self) -> None:
        self._arrival = None
        if self.transport.is_closing():
            return
        # We have not read on ourselves, or the answer to an earlier request is still on its way.
        if self.flow.read_paused or (self._answering and self._answered is not self.cycle):
            self._await_more()
        elif self.cycle is None and not self._head_bytes:
            self.transport.close()  # a connection made in advance, as browsers do
        else:
            self._refuse(ApiError(408, f"The request did not arrive within {PATIENCE_SECONDS:g} seconds.",
                                  code="request_timeout"))

    # What goes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_departure()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._departure is not None and not self.transport.is_closing():
            self._departure.cancel()
            self._departure = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_departure()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_departure()

    def _expect_departure(self) -> None:
        if self._departure is None:
            self._departure = self.loop.call_later(PATIENCE_SECONDS, self.transport.abort)

    @property
    def _cycle_ended(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    @property
    def _answering(self) -> bool:
        cycle = self._answered
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """With `error` as the answer, unless another one has begun, or was given before the request was whole."""
        if not self._answering and not (self._cycle_ended and self.cycle.more_body):
            self.transport.write(_answer(error))
        self._leave()
        self.transport.close()
        self._expect_departure()

    def _turn_away(self) -> None:
        """A connection too many, which does not count."""
        self._turned_away = True
        self.connections.discard(self)
        error = unavailable(f"The server has {self._limit.most} connections, its limit (--max_connections); try again "
                            "shortly.", "too_many_connections", FULL_RETRY_SECONDS)
        self._limit.turn_away(self.transport, _answer(error), self.loop)

    def _leave(self) -> None:
        """The request at work hears that its client has left, and writes no more to a closed connection."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()


def _answer(error: ApiError) -> bytes:
    body = error.body()
    headers = {"content-type": "application/json", "content-length": len(body), "connection": "close",
               **(error.headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body
