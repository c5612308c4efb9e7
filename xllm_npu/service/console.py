"""The web console: a few static files at / and /console/, and the JSON that its live page asks for.

The files are read once, at start, and hold no secret: a browser that opens a page can send no API key, so they are
answered without one. What they then ask for is the API's own routes and /console/state, where the key counts.
The policy lets a page load nothing but these files and talk to nobody but this server.
"""

from __future__ import annotations

import hashlib
import html
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from xllm_npu.service.console_state import StateCache

if TYPE_CHECKING:
    from xllm_npu.config.service import ServiceSettings
    from xllm_npu.service.context import ApiContext

INDEX = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}  # fmt: skip
FILES = (INDEX, "console.css", "icon.svg", "main.js", "api.js", "chat.js", "transcript.js", "markdown.js",
         "sampling.js", "engine.js", "live.js", "sparkline.js", "dom.js")
STATE_PATH = "/console/state"
BASE = "<base href=\"/\">"  # in the page; becomes the prefix that a proxy in front adds
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
          "base-uri 'self'; form-action 'none'; frame-ancestors 'none'")
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY", "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-cache",
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class StaticFile:
    content: bytes
    headers: dict[str, str]
    media_type: str

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers, media_type=self.media_type)


def read_files(root_path: str) -> dict[str, StaticFile]:
    """By path."""
    folder = resources.files("xllm_npu.service") / "console_static"
    found = {}
    for name in FILES:
        content = (folder / name).read_bytes()
        if name == INDEX:
            base = f'<base href="{html.escape(root_path.rstrip("/"))}/">'
            content = content.replace(BASE.encode(), base.encode())
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        path = "/" if name == INDEX else f"/console/{name}"
        found[path] = StaticFile(content, {**HEADERS, "ETag": tag}, MEDIA_TYPES[name.rpartition(".")[2]])
    return found


def console_paths(service: ServiceSettings) -> frozenset[str]:
    """What a browser gets without an API key."""
    if not service.enable_console:
        return frozenset()
    return frozenset({"/", *(f"/console/{name}" for name in FILES if name != INDEX)})


def console_router(context: ApiContext, service: ServiceSettings) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    cache = StateCache(context)
    for path, file in read_files(service.root_path).items():
        router.add_api_route(path, file.response, methods=["GET"], response_model=None)

    @router.get(STATE_PATH)
    async def state() -> Response:
        return Response(msgspec.json.encode(cache.state()), media_type="application/json",
                        headers={"Cache-Control": "no-store"})

    return router
