"""uvicorn's HTTP/1.1 protocol with a bound on what comes before a body, and our envelope for unreadable requests.

The parser keeps headers (and trailers, and chunk framing) in memory until they are whole, without a limit of its
own; a connection that sends more of it than `MAX_HEAD_BYTES` in one piece is answered 431 and closed.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from xllm_npu.service.errors import ApiError

MAX_HEAD_BYTES = 256 * 1024


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # received since the last whole header block or piece of a body
        self._progress = False

    def data_received(self, data: bytes) -> None:
        self._progress = False
        super().data_received(data)
        self._head_bytes = 0 if self._progress else self._head_bytes + len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"The request's headers exceed {MAX_HEAD_BYTES} bytes.",
                                  code="headers_too_large"))

    def on_headers_complete(self) -> None:
        self._progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        self.transport.write(b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                             % (STATUS_LINE[error.status], len(body), body))
        self.transport.close()
