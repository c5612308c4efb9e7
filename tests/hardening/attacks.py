"""`attack(seed, number)`: one malformed, hostile or impatient request, the same one for the same seed and number."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.hardening.bodies import JUNK, POSTS, broken
from tests.hardening.explosions import cheap_requests, template_requests
from tests.hardening.wire import PAUSE, Exchange

GETS = (
    "/", "/console/console.js", "/console/state", "/console/..%2f..%2fetc%2fpasswd", "/console/%00", "/health", "/ping",
    "/load", "/metrics", "/version", "/v1/models", "/v1/models/tiny", "/v1/models/a%2Fb", "/v1/models/%ff%fe",
    "/v1/responses/resp_x", "/v1/responses/%00/input_items", "/v1/responses/a?stream=1", "/v1/responses/a?stream=maybe",
    "/openapi.json", "/docs", "/v1/", "//v1/models", "/v1//models", "/./v1/models", "/../../etc/passwd", "*",
    "/v1/models?" + "a=b&" * 3000, "/" + "a" * 60_000, "/%", "/%zz", "/\xff\xfe", "/v1/models#x",
    "http://elsewhere/v1/models",
    "", "/v1/models/" + "%41" * 5000, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/status",
)  # fmt: skip
ADMIN_GETS = ("/is_sleeping", "/is_paused", "/status", "/server_info", "/weight_info", "/get_world_size", "/sleep",
              "/openapi.json", "/nothing")
# What changes a model's state is only ever asked of a model that there is none of.
ADMIN_POSTS = ("/sleep", "/wakeup", "/wake_up", "/pause", "/resume", "/fork_master", "/reset_prefix_cache",
               "/start_profile", "/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights",
               "/update_weights_from_disk", "/abort_requests", "/nothing")
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "BREW", "")
TYPES = (
    "application/json", "application/json; charset=utf-16", "APPLICATION/JSON", "application/vnd.x+json", "text/plain",
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/octet-stream", "", "/",
    "a" * 9000,
)  # fmt: skip
HEADERS: tuple[str, ...] = (
    "Content-Encoding: gzip", "Content-Encoding: deflate, br", "Accept-Encoding: gzip;q=9e99", "Expect: 100-continue",
    "Expect: nothing", "Upgrade: websocket\r\nConnection: Upgrade",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings",
    "X-Request-Id: \x01\x7f", "X-Request-Id: " + "r" * 500, "Authorization: Bearer \xff", "Authorization: Basic Og==",
    "Origin: null", "Origin: https://elsewhere", "Access-Control-Request-Method: POST", "Cookie: " + "c" * 20_000,
    "traceparent: 00-" + "f" * 2000, "Range: bytes=0-1,-5,9999999999999-", "If-None-Match: " + '"a",' * 3000,
    "Host: elsewhere",
    "X-Forwarded-For: 127.0.0.1", "X-Api-Key: k", "anthropic-version: \0", "Content-Type: text/plain",
    "Accept: */*;q=nan",
    "X-A: b\r\n continued", "no colon", ": no name", "X y: z", "X-Forwarded-Proto: gopher", "Forwarded: for=\"",
)  # fmt: skip


@dataclass
class Attack:
    what: str
    exchange: Exchange
    admin: bool = False


def attack(seed: int, number: int) -> Attack:
    rng = random.Random(f"{seed}:{number}")
    kind = rng.random()
    if kind < 0.66:
        return _body_attack(rng)
    if kind < 0.70:
        return _sent(rng, "explosion", *rng.choice(_explosions()))
    if kind < 0.703:
        return _sent(rng, "template", *rng.choice(_templates()))
    if kind < 0.82:
        return _route_attack(rng)
    if kind < 0.92:
        return _framing_attack(rng)
    return _admin_attack(rng)


_explosions = cache(cheap_requests)
_templates = cache(template_requests)


def head(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def request(path: str, body: bytes, *headers: str, type: str = "application/json") -> bytes:
    return head("POST", path, f"Content-Type: {type}", f"Content-Length: {len(body)}", *headers) + body


def chunked(rng: random.Random, path: str, body: bytes) -> list[bytes]:
    pieces = [head("POST", path, "Content-Type: application/json", "Transfer-Encoding: chunked")]
    while body:
        size = rng.choice((1, 7, 100, 5000, len(body)))
        piece, body = body[:size], body[size:]
        pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        if len(pieces) > 50:
            size = len(body)
    return [*pieces, b"0\r\n\r\n"]


def cut(rng: random.Random, data: bytes, count: int) -> list[bytes]:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(count - 1))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def _body_attack(rng: random.Random) -> Attack:
    path, body = rng.choice(POSTS[:4] if rng.random() < 0.7 else POSTS)
    data = broken(rng, {"model": "tiny", **body})
    headers = [rng.choice(HEADERS)] if rng.random() < 0.1 else []
    type = rng.choice(TYPES) if rng.random() < 0.1 else "application/json"
    whole = request(path, data, *headers, type=type)
    return Attack(*_manner(rng, path, data, whole))


def _sent(rng: random.Random, what: str, path: str, body: Any) -> Attack:
    streamed = {"stream": True} if rng.random() < 0.3 and path != "/tokenize" else {}
    body = {"model": "tiny", **body, **streamed}
    return Attack(f"{what} {path}", Exchange([request(path, json.dumps(body).encode())],
                                             read=rng.choice((None, None, None, 0))))


def _manner(rng: random.Random, path: str, data: bytes, whole: bytes) -> tuple[str, Exchange]:
    """How it is sent, and how its answer is read: in half of all cases as it should be."""
    kind = rng.randrange(24)
    if kind == 0:
        return f"chunked {path}", Exchange(chunked(rng, path, data))
    if kind == 1:
        pieces = chunked(rng, path, data)
        return f"chunked, unfinished {path}", Exchange(pieces[: rng.randrange(1, len(pieces))], read=0)
    if kind == 2:
        pieces = chunked(rng, path, data)
        pieces.insert(rng.randrange(1, len(pieces)), rng.choice((b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n",
                                                                 b"\r\n\r\n", b"5;a=b\r\n")))
        return f"chunked, broken {path}", Exchange(pieces, half_close=True)
    if kind in (3, 4):
        return f"leaves in the request {path}", Exchange([whole[: rng.randrange(len(whole))]], read=0, reset=kind == 4)
    if kind in (5, 6):
        return f"leaves after the request {path}", Exchange([whole], read=0, reset=kind == 6)
    if kind in (7, 8):
        return f"leaves in the answer {path}", Exchange([whole], read=rng.choice((1, 200, 600)), reset=kind == 8)
    if kind == 9:
        return f"slow writer {path}", Exchange(cut(rng, whole, 12), pause=PAUSE)
    if kind == 10:
        return f"slow reader {path}", Exchange([whole], slow=True, read=2500)
    if kind == 11:
        return f"says that it has written all {path}", Exchange([whole], half_close=True)
    if kind == 12:
        several = whole.replace(b"Connection: close\r\n", b"") * rng.randint(2, 12)
        return f"pipelined {path}", Exchange([several + head("GET", "/version")], read=rng.choice((None, 0, 300)))
    return path, Exchange([whole])


def _route_attack(rng: random.Random) -> Attack:
    path = rng.choice(GETS) if rng.random() < 0.7 else rng.choice(POSTS)[0]
    method = "GET" if rng.random() < 0.5 else rng.choice(METHODS)
    headers = [rng.choice(HEADERS) for _ in range(rng.choice((0, 0, 1, 3)))]
    # A client that half-closes is not always answered.
    return Attack(f"{method} {path[:60]}", Exchange([head(method, path, *headers)], half_close=rng.random() < 0.5))


def _framing_attack(rng: random.Random) -> Attack:
    path, body = rng.choice(POSTS)
    data = json.dumps(body).encode()
    what, pieces = rng.choice(FRAMINGS)(rng, path, data)
    return Attack(f"{what} {path}", Exchange(pieces, half_close=True, read=rng.choice((None, None, 0))))


def _announced(length: str) -> Callable[[random.Random, str, bytes], tuple[str, list[bytes]]]:
    def framing(rng: random.Random, path: str, data: bytes) -> tuple[str, list[bytes]]:
        return f"Content-Length {length[:20]}", [head("POST", path, "Content-Type: application/json",
                                                      f"Content-Length: {length}") + data]

    return framing


def _raw(what: str, *pieces: bytes) -> Callable[[random.Random, str, bytes], tuple[str, list[bytes]]]:
    return lambda rng, path, data: (what, list(pieces))


FRAMINGS: tuple[Callable[[random.Random, str, bytes], tuple[str, list[bytes]]], ...] = (
    *(_announced(length) for length in (
        "-1", "0", "5", "99999", "1048577", "18446744073709551616", "9" * 5000, "1e3", "0x10", "+5", " ", "5, 6",
        "\xb2")),
    _raw("no HTTP", b"hello\r\n\r\n"), _raw("HTTP/0.9", b"GET /\r\n"), _raw("HTTP/2",
                                                                            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    _raw("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512)), _raw("nothing"), _raw("zeros",
                                                                                                     bytes(5000)),
    _raw("HTTP/9.9", b"GET / HTTP/9.9\r\n\r\n"), _raw("bare newlines", b"GET /version HTTP/1.1\nHost: x\n\n"),
    _raw("header flood", b"GET /version HTTP/1.1\r\n", *[b"X-A: b\r\n" * 512] * 80),
    _raw("endless header", b"GET /version HTTP/1.1\r\nX: ", *[b"a" * 4096] * 80),
    _raw("endless request line", b"GET /", *[b"a" * 4096] * 80),
    _raw("endless trailers", b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
         *[b"A: b\r\n" * 600] * 80),
    lambda rng, path, data: ("two lengths", [head("POST", path, "Content-Type: application/json", "Content-Length: 5",
                                                  f"Content-Length: {len(data)}") + data]),
    lambda rng, path, data: ("length and chunks", [head("POST", path, "Content-Type: application/json",
                                                        "Content-Length: 5",
                                                        "Transfer-Encoding: chunked") + b"0\r\n\r\n" + data]),
    lambda rng, path, data: ("unknown coding", [head("POST", path, "Transfer-Encoding: gzip, chunked") + data]),
    lambda rng, path, data: ("HTTP/1.0", [request(path, data).replace(b"HTTP/1.1", b"HTTP/1.0", 1)]),
    lambda rng, path, data: ("more after the end", [request(path, data) + bytes(3000)]),
    lambda rng, path, data: ("many headers", [request(path, data, *(f"X-{i}: {i}" for i in range(2000)))]),
    lambda rng, path, data: ("too large, in chunks", [*chunked(rng, path, b" " * 1_100_000 + data)]),
    lambda rng, path, data: ("pipelined flood", [head("GET", "/version").replace(b"Connection: close\r\n", b"") * 400]),
)  # fmt: skip


def _admin_attack(rng: random.Random) -> Attack:
    if rng.random() < 0.3:
        path = rng.choice(ADMIN_GETS) + rng.choice(("", "?model=nobody", "?model=%ff", "?model=" + "a" * 5000))
        return Attack(f"admin GET {path[:60]}", Exchange([head(rng.choice(METHODS[:6]), path)], half_close=True),
                      admin=True)
    path = rng.choice(ADMIN_POSTS)
    value = rng.choice((json.dumps(rng.choice(JUNK))[:2000].replace(" ", ""), "9" * 5000, "\xb2", "1", "-1", "a%00b"))
    names = ("level", "mode", "tags", "master_status", "nnodes", "dp_size", "model_path", "reset_running_requests",
             "path", "weight_version", "request_ids")
    query = f"?model=nobody&{rng.choice(names)}={value}".replace("\\", "%5c").replace('"', "%22")
    body = {name: rng.choice(JUNK) for name in rng.sample(names, 3)} | {"model": rng.choice(("nobody", 5, [],
                                                                                             "\ud800"))}
    if rng.random() < 0.3:
        data = broken(rng, body)
    else:
        data = json.dumps(body).encode()
        query = query if b'"nobody"' not in data or rng.random() < 0.5 else ""
    headers = [rng.choice(HEADERS)] if rng.random() < 0.2 else []
    return Attack(f"admin {path}{query[:60]}", Exchange([request(path + query, data, *headers)], half_close=True),
                  admin=True)
