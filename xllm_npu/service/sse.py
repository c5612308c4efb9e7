"""Server-sent events: chunk framing, and the response that sends what a generator yields until someone stops it.

Every yield of the generator is one write, however many frames it holds, and the next one is asked for only
when the connection has taken the last: a slow reader holds its own stream back and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xllm_npu.service import replies
from xllm_npu.service.admission import Admission
from xllm_npu.service.errors import ApiError, internal_error
from xllm_npu.service.watch import ClientGone, Watch

logger = logging.getLogger("xllm_npu.service")

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class ChunkFormat:
    """Frames of one response: what all its chunks share is encoded once."""

    def __init__(self, id: str, object: str, created: int, model: str, with_usage: bool) -> None:
        shared = _encode({"id": id, "object": object, "created": created, "model": model,
                          "system_fingerprint": None})
        self._head = b"data: " + shared[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def chunk(self, choice: msgspec.Struct, usage: replies.Usage | None = None,
              extra: Mapping[str, object] | None = None) -> bytes:
        """`extra`: further fields beside the choices."""
        tail = self._tail
        if usage is not None or extra:
            tail = self._special_tail(usage, extra or {})
        return self._head + _encode(choice) + tail

    def usage_chunk(self, usage: replies.Usage) -> bytes:
        return self._head + self._special_tail(usage, {})

    def _special_tail(self, usage: replies.Usage | None, fields: Mapping[str, object]) -> bytes:
        tail = b"]"
        for name, value in fields.items():
            tail += b"," + _encode(name) + b":" + _encode(value)
        if usage is None:
            return tail + self._tail[1:]
        return tail + b',"usage":' + _encode(usage) + b"}\n\n"


def error_frame(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


class EventStream(Response):
    """Sends `frames`; a failure on the way becomes an error frame, the last of the stream, by `as_frame`.

    `frames` is closed in every case, which aborts the request behind it.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], admission: Admission,
                 as_frame: Callable[[ApiError], bytes] = error_frame) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.body = b""
        self.raw_headers = [(b"content-type", b"text/event-stream; charset=utf-8"),
                            (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self._frames = frames
        self._admission = admission
        self._as_frame = as_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = Watch(receive)
        last = b""
        try:
            async with watch:
                with self._admission.watched(watch):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for data in self._frames:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            return
        except ApiError as exc:
            last = self._as_frame(exc)
        except Exception:
            logger.exception("unexpected failure while streaming %s", scope["path"])
            last = self._as_frame(internal_error())
        finally:
            await self._frames.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})
