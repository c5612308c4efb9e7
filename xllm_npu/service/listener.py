"""The listening socket: bound before the model loads, so that a taken port fails at once and not in minutes."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xllm_npu.config.service import ServiceSettings


class ListenError(RuntimeError):
    """The address cannot be listened on; the message says what to change."""


def listen(settings: ServiceSettings) -> socket.socket:
    return _listen_unix(settings.uds) if settings.uds else _listen_tcp(settings.host, settings.port)


def listen_admin(settings: ServiceSettings) -> socket.socket | None:
    """None where there are no admin routes."""
    return _listen_tcp(settings.admin_host, settings.admin_port, "--admin-") if settings.admin_port else None


def check_tls(settings: ServiceSettings) -> None:
    """Load the TLS files once, to fail before the model loads."""
    if not settings.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        if settings.ssl_ca_certs:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ssl.SSLError) as exc:
        raise ListenError(f"The TLS files cannot be used: {exc.strerror or exc}. Check --ssl_certfile, "
                          "--ssl_keyfile and --ssl_ca_certs.") from exc


def url_of(sock: socket.socket, settings: ServiceSettings) -> str:
    if settings.uds:
        return f"unix:{settings.uds}"
    return tcp_url(sock, settings) + settings.root_path


def tcp_url(sock: socket.socket, settings: ServiceSettings) -> str:
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{host}:{port}"


def remove_unix_socket(settings: ServiceSettings) -> None:
    if settings.uds and _is_socket(settings.uds):
        os.unlink(settings.uds)


def _listen_tcp(host: str, port: int, flags: str = "--") -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                             flags=socket.AI_PASSIVE)[0]
    except OSError as exc:
        raise ListenError(f"Cannot resolve the address {host!r}: {exc.strerror}. Choose another {flags}host.") from exc
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        raise ListenError(_tcp_advice(host, port, exc, flags)) from exc
    return sock


def _tcp_advice(host: str, port: int, exc: OSError, flags: str) -> str:
    if exc.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use. Stop what listens there, or choose another {flags}port."
    if exc.errno == errno.EACCES:
        return f"Port {port} needs privileges. Choose a {flags}port of 1024 or above."
    return f"Cannot listen on {host}:{port}: {exc.strerror}. Choose another {flags}host or {flags}port."


def _listen_unix(path: str) -> socket.socket:
    if _is_socket(path):
        if _answers(path):
            raise ListenError(f"A server already listens on {path}. Stop it, or choose another --uds.")
        os.unlink(path)  # left behind by a server that was killed
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        raise ListenError(f"Cannot listen on {path}: {exc.strerror or exc}. Choose another --uds.") from exc
    return sock


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
