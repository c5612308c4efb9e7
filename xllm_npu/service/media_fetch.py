"""Fetches a URL that a client names, without becoming that client's hand inside the operator's network.

Rules, for the first address and every redirect alike:
- http and https only, on their usual ports, no user names, one reading of the host (`media_url.py`);
- if there is a list of domains, one of them;
- the name is resolved once, every address that comes back must be a public one, and one of these is dialled: a name
  that resolves to something else a moment later gains nothing;
- TLS is checked against the name; from https there is no way back to http;
- bounds on redirects, on time (all hops together), on header bytes and on content; no compressed content, which could
  be larger than it is. Proxies of the environment are not used.

Messages carry no address: what a name resolves to inside this network is none of the client's business. Nothing serves
media yet; whatever will takes URLs through here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes, urljoin

import h11

from xllm_npu.service.media_url import Address, MediaRefused, MediaUrl, is_public, parse_media_url

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK = 1 << 16


@dataclass(slots=True, frozen=True)
class MediaLimits:
    max_bytes: int = 64 * 2**20
    max_redirects: int = 3
    max_header_bytes: int = 32 * 2**10
    seconds: float = 10.0  # for everything together
    domains: tuple[str, ...] = ()  # names, or ".example.com" for all below it; empty: all
    ports: frozenset[int] = field(default_factory=lambda: frozenset({80, 443}))


@dataclass(slots=True, frozen=True)
class Media:
    content: bytes
    media_type: str  # as the server says, lower case, without parameters; may be empty


async def resolve(host: str, port: int) -> list[str]:
    """Addresses by the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class MediaFetcher:
    """`resolver` and `permitted` (whether an address may be dialled) are for tests and for networks of one's own."""

    def __init__(self, limits: MediaLimits | None = None, resolver: Resolve = resolve,
                 permitted: Callable[[Address], bool] = is_public, tls: ssl.SSLContext | None = None) -> None:
        self._limits = limits or MediaLimits()
        self._resolve, self._permitted = resolver, permitted
        self._tls = tls or ssl.create_default_context()

    async def fetch(self, url: str) -> Media:
        """Raises MediaRefused, with a sentence for the client."""
        if url[:5].lower() == "data:":
            return decode_data_url(url, self._limits.max_bytes)
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._follow(url)
        except TimeoutError:
            raise MediaRefused(f"The media took longer than {self._limits.seconds:g} s.") from None

    async def _follow(self, url: str) -> Media:
        target = self._checked(url)
        for _ in range(self._limits.max_redirects + 1):
            answer = await self._get(target)
            if isinstance(answer, Media):
                return answer
            then = self._checked(urljoin(target.text, answer))
            if target.secure and not then.secure:
                raise MediaRefused("The media's server redirects from https to http.")
            target = then
        raise MediaRefused(f"The media's server redirects more than {self._limits.max_redirects} times.")

    def _checked(self, url: str) -> MediaUrl:
        target = parse_media_url(url)
        if target.port not in self._limits.ports:
            raise MediaRefused(f"Media may not be fetched from port {target.port}.")
        if not in_domains(target.host, self._limits.domains):
            raise MediaRefused(f"Media may not be fetched from {target.host}: it is not among the allowed domains.")
        return target

    async def _addresses(self, target: MediaUrl) -> list[str]:
        """All that the name stands for; none of them may be inside."""
        if target.address is not None:
            found: Sequence[str] = [str(target.address)]
        else:
            try:
                found = await self._resolve(target.host, target.port)
            except (OSError, UnicodeError):
                found = []
        if not found:
            raise MediaRefused(f"The host {target.host} cannot be found.")
        for address in found:
            if not self._permitted(ipaddress.ip_address(address)):
                raise MediaRefused(f"Media may not be fetched from {target.host}.")
        return list(found)

    async def _get(self, target: MediaUrl) -> Media | str:
        """The content, or where the server redirects to."""
        reader, writer = await self._connect(target)
        try:
            exchange = Exchange(reader, writer, self._limits)
            return await exchange.get(target)
        except (OSError, asyncio.IncompleteReadError, h11.RemoteProtocolError):
            raise MediaRefused(f"The answer of {target.host} cannot be read.") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _connect(self, target: MediaUrl) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for address in await self._addresses(target):
            with contextlib.suppress(OSError):  # the next one may answer; TLS that does not fit is an OSError too
                if not target.secure:
                    return await asyncio.open_connection(address, target.port)
                return await asyncio.open_connection(address, target.port, ssl=self._tls, server_hostname=target.host)
        raise MediaRefused(f"The host {target.host} cannot be reached.")


class Exchange:
    """One request and its answer on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: MediaLimits) -> None:
        self._reader, self._writer, self._limits = reader, writer, limits
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.max_header_bytes)

    async def get(self, target: MediaUrl) -> Media | str:
        headers = [("Host", target.authority), ("Accept", "*/*"), ("Accept-Encoding", "identity"),
                   ("User-Agent", "xllm-npu"), ("Connection", "close")]
        request = self._http.send(h11.Request(method="GET", target=target.path, headers=headers))
        self._writer.write((request or b"") + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()
        answer = await self._response()
        found = {name.decode("ascii"): value.decode("latin-1") for name, value in answer.headers}
        if answer.status_code in REDIRECTS and "location" in found:
            return found["location"]
        if answer.status_code != 200:
            raise MediaRefused(f"{target.host} answered {answer.status_code}.")
        if found.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise MediaRefused(f"{target.host} sends compressed content, which is not taken.")
        length = found.get("content-length", "")
        if length.isdecimal() and int(length) > self._limits.max_bytes:
            raise self._too_large()
        return Media(await self._body(), found.get("content-type", "").partition(";")[0].strip().lower())

    async def _response(self) -> h11.Response:
        for _ in range(8):  # informational answers come first, and are few
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                break
        raise h11.RemoteProtocolError("no answer")

    async def _body(self) -> bytes:
        content = bytearray()
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("the answer ends early")
            content += event.data
            if len(content) > self._limits.max_bytes:
                raise self._too_large()
        return bytes(content)

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    def _too_large(self) -> MediaRefused:
        return MediaRefused(f"The media is larger than {self._limits.max_bytes} bytes.")


def in_domains(host: str, domains: Collection[str]) -> bool:
    if not domains:
        return True
    return any(host.endswith(name.lower()) if name.startswith(".") else host == name.lower() for name in domains)


def decode_data_url(url: str, max_bytes: int) -> Media:
    """RFC 2397. Raises MediaRefused."""
    head, comma, data = url[5:].partition(",")
    if not comma or len(head) > 200:
        raise MediaRefused("The data URL is malformed.")
    media_type, *parameters = head.split(";")
    encoded = bool(parameters) and parameters[-1].strip().lower() == "base64"
    if len(data) > (max_bytes * 4 // 3 + 4 if encoded else 3 * max_bytes):
        raise MediaRefused(f"The media is larger than {max_bytes} bytes.")
    try:
        content = base64.b64decode(data, validate=True) if encoded else unquote_to_bytes(data)
    except (binascii.Error, ValueError):
        raise MediaRefused("The data URL is not valid base64.") from None
    if len(content) > max_bytes:
        raise MediaRefused(f"The media is larger than {max_bytes} bytes.")
    return Media(content, media_type.strip().lower() or "text/plain")
