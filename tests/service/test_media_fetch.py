"""What a client's URL can and cannot make the server do; names resolve as the test says, servers are local."""

import asyncio
import contextlib
import ipaddress
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from xllm_npu.service.media_fetch import MediaFetcher, MediaLimits, decode_data_url, in_domains
from xllm_npu.service.media_url import MediaRefused, is_public, parse_media_url

OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/PNG; x=y\r\nContent-Length: 4\r\n\r\nbody"


class Names:
    """A resolver that answers from a table, each name with its lists one after the other."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


class Local:
    def __init__(self, port: int, requests: list[bytes]) -> None:
        self.port, self.requests = port, requests


@contextlib.asynccontextmanager
async def serving(answer: bytes | Callable[[bytes], bytes], *, then_waits: bool = False,
                  tls: ssl.SSLContext | None = None) -> AsyncIterator[Local]:
    requests: list[bytes] = []
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            requests.append(request)
            writer.write(answer(request) if callable(answer) else answer)
            await writer.drain()
            if then_waits:
                await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield Local(server.sockets[0].getsockname()[1], requests)
    finally:
        over.set()
        server.close()
        await server.wait_closed()


def fetcher(port: int, names: Names | None = None, **limits: object) -> MediaFetcher:
    """127.0.0.1 is outside for it, everything else is as it is."""
    outside = ipaddress.ip_address("127.0.0.1")
    return MediaFetcher(MediaLimits(**{"ports": frozenset({port}), **limits}),
                        names or Names(media_example=[["127.0.0.1"]]), lambda a: a == outside or is_public(a))


def parse_host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].strip("[]") or "\0"


async def refused(fetching: MediaFetcher, url: str) -> str:
    with pytest.raises(MediaRefused) as error:
        await fetching.fetch(url)
    message = str(error.value).replace(parse_host(url), "")  # what the client wrote may be said to it
    assert not any(address in message for address in ("127.0.0.1", "10.0.0.", "169.254", "::1"))
    return message


async def test_media_and_what_is_asked():
    async with serving(OK) as server:
        media = await fetcher(server.port).fetch(f"http://MEDIA.example.:{server.port}/a%20b?c=d#e")
    assert (media.content, media.media_type) == (b"body", "image/png")
    head = server.requests[0].decode()
    assert head.startswith("GET /a%20b?c=d HTTP/1.1\r\n")
    assert f"Host: media.example:{server.port}\r\n" in head
    assert "Accept-Encoding: identity\r\n" in head


async def test_chunked_and_unframed_content():
    for answer in (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n",
                   b"HTTP/1.1 200 OK\r\n\r\nbody", b"HTTP/1.1 103 Early\r\n\r\n" + OK):
        async with serving(answer) as server:
            assert (await fetcher(server.port).fetch(f"http://media.example:{server.port}/")).content == b"body"


async def test_the_address_that_was_checked_is_the_one_that_is_dialled():
    """The name resolves to the inside the second time it is asked for: it is not asked for."""
    names = Names(media_example=[["127.0.0.1"], ["10.0.0.1"]])
    async with serving(OK) as server:
        fetching = fetcher(server.port, names)
        await fetching.fetch(f"http://media.example:{server.port}/")
        assert names.asked == ["media.example"]
        assert "may not" in await refused(fetching, f"http://media.example:{server.port}/")
        assert len(server.requests) == 1


async def test_one_address_inside_is_enough():
    async with serving(OK) as server:
        names = Names(media_example=[["127.0.0.1", "169.254.169.254"]])
        assert "may not" in await refused(fetcher(server.port, names), f"http://media.example:{server.port}/")
        assert server.requests == []


async def test_the_next_address_is_tried():
    """Nothing listens on the first one."""
    names = Names(media_example=[["127.0.0.2", "127.0.0.1"]])
    async with serving(OK) as server:
        fetching = MediaFetcher(MediaLimits(ports=frozenset({server.port})), names, lambda address: True)
        assert (await fetching.fetch(f"http://media.example:{server.port}/")).content == b"body"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "100.100.100.200", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.88.99.1",
     "168.63.129.16", "::", "::1", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
     "::127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:a00:1::", "2001:db8::1"],
)  # fmt: skip
async def test_addresses_of_the_inside(address):
    assert not is_public(ipaddress.ip_address(address))
    fetching = MediaFetcher(resolver=Names(media_example=[[address]]))
    assert "may not" in await refused(fetching, "http://media.example/")
    literal = f"[{address}]" if ":" in address else address
    assert "may not" in await refused(fetching, f"https://{literal}/")


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_outside(address):
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    ["", "media.example", "//media.example/", "ftp://media.example/", "file:///etc/passwd", "gopher://media.example/",
     "http:///", "http://user@media.example/", "http://a:b@media.example/", "http://media.example\\@127.0.0.1/",
     "http://127.0.0.1\\.media.example/", "http://media.example:99999/", "http://media.example:x/", "http://me dia/",
     "http://media.example/a b", "http://media.example/\r\nX: y", "http://media.example\t/", "http://a..b/", "http://-a.b/",
     "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://127.1/", "http://010.0.0.1/", "http://1.2.3.4.5/",
     "http://[::1%25lo]/", "http://[::1/", "http://[media.example]/", "http://média.example/", "http://１２７.0.0.1/",
     "http://media.example/" + "a" * 5000, "jar:http://media.example/", "HTTP://%6dedia.example/"],
)  # fmt: skip
async def test_urls_with_more_than_one_reading(url):
    names = Names(media_example=[["8.8.8.8"]])
    await refused(MediaFetcher(resolver=names), url)
    assert names.asked == []


def test_urls_of_one_reading():
    url = parse_media_url("HTTPS://Media.Example?a=é#x".replace("é", "%C3%A9"))
    assert (url.secure, url.host, url.port, url.path, url.authority) == (
        True, "media.example", 443, "/?a=%C3%A9", "media.example")
    assert parse_media_url("http://media.example/é").path == "/%C3%A9"
    assert parse_media_url("http://[2606:4700::1]:81/").authority == "[2606:4700::1]:81"


async def test_ports_and_domains():
    names = Names(media_example=[["8.8.8.8"]])
    assert "port 22" in await refused(MediaFetcher(resolver=names), "http://media.example:22/")
    listed = MediaFetcher(MediaLimits(domains=("other.example",)), names)
    assert "allowed domains" in await refused(listed, "http://media.example/")
    assert names.asked == []
    assert in_domains("a.b.example", (".b.example",))
    assert not in_domains("b.example", (".b.example",))
    assert not in_domains("xb.example", ("b.example",))
    assert not in_domains("b.example.evil", ("b.example", ".b.example"))


def redirect(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


async def test_every_hop_is_checked():
    async with serving(OK) as last:
        async with serving(lambda request: redirect("/next") if b"/first" in request else OK) as server:
            got = await fetcher(server.port).fetch(f"http://media.example:{server.port}/first")
            assert got.content == b"body"
        for to, why in ((f"http://127.0.0.2:{last.port}/", "may not"),
                        (f"http://inside.example:{last.port}/", "may not"),
                        ("file:///etc/passwd", "plain"), ("http://media.example:22/", "port 22"),
                        ("gopher://x/", "plain"), ("http://user@media.example/", "plain")):
            async with serving(redirect(to, 307)) as server:
                names = Names(media_example=[["127.0.0.1"]], inside_example=[["10.0.0.1"]])
                fetching = fetcher(server.port, names, ports=frozenset({server.port, last.port}))
                assert why in await refused(fetching, f"http://media.example:{server.port}/"), to
    assert last.requests == []


async def test_redirects_are_few():
    async with serving(redirect("/again")) as server:
        assert "more than 3" in await refused(fetcher(server.port), f"http://media.example:{server.port}/")
        assert len(server.requests) == 4


async def test_bounds_of_size():
    big = b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n"
    for answer in (big, chunked, b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000):
        async with serving(answer, then_waits=answer is not chunked) as server:
            url = f"http://media.example:{server.port}/"
            assert "larger than 1000" in await refused(fetcher(server.port, max_bytes=1000), url)
    async with serving(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, then_waits=True) as server:
        assert "cannot be read" in await refused(fetcher(server.port), f"http://media.example:{server.port}/")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbody", b"nonsense\r\n\r\n",
                                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
async def test_answers_that_cannot_be_read(answer):
    async with serving(answer) as server:
        assert "cannot be read" in await refused(fetcher(server.port), f"http://media.example:{server.port}/")


async def test_other_answers():
    async with serving(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n") as server:
        assert "answered 404" in await refused(fetcher(server.port), f"http://media.example:{server.port}/")
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx") as server:
        assert "compressed" in await refused(fetcher(server.port), f"http://media.example:{server.port}/")
    assert "cannot be found" in await refused(MediaFetcher(resolver=Names()), "http://media.example/")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbo"])
async def test_a_bound_of_time_whatever_the_server_does(answer):
    async with serving(answer, then_waits=True) as server:
        message = await refused(fetcher(server.port, seconds=0.2), f"http://media.example:{server.port}/")
        assert "longer than 0.2 s" in message


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """Of media.example, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = (tmp_path_factory.mktemp("tls") / name for name in ("cert.pem", "key.pem"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=media.example",
                    "-addext", "subjectAltName=DNS:media.example"], check=True, capture_output=True)
    return cert, key


async def test_tls_is_checked_against_the_name(certificate):
    cert, key = certificate
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(cert, key)
    ours = ssl.create_default_context(cafile=str(cert))
    names = Names(media_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]])
    async with serving(OK, tls=theirs) as server:
        limits = MediaLimits(ports=frozenset({server.port}))
        trusting = MediaFetcher(limits, names, lambda address: True, ours)
        assert (await trusting.fetch(f"https://media.example:{server.port}/")).content == b"body"
        assert "cannot be reached" in await refused(trusting, f"https://other.example:{server.port}/")
        strange = MediaFetcher(limits, names, lambda address: True)
        assert "cannot be reached" in await refused(strange, f"https://media.example:{server.port}/")
    async with serving(redirect(f"http://media.example:{server.port}/"), tls=theirs) as down:
        limits = MediaLimits(ports=frozenset({server.port, down.port}))
        downgraded = MediaFetcher(limits, names, lambda address: True, ours)
        assert "https to http" in await refused(downgraded, f"https://media.example:{down.port}/")


async def test_data_urls():
    media = await MediaFetcher().fetch("data:image/PNG;base64,Ym9keQ==")
    assert (media.content, media.media_type) == (b"body", "image/png")
    assert decode_data_url("data:,a%20b", 10).content == b"a b"
    for url, why in (("data:nothing", "malformed"), ("data:;base64,Ym9keQ=", "base64"), ("data:;base64,é", "base64"),
                     ("data:;base64," + "A" * 100, "larger"), ("data:," + "a" * 31, "larger")):
        with pytest.raises(MediaRefused, match=why):
            decode_data_url(url, 10)
