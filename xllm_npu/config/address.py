"""Network addresses as people write them: `host:port`, with an IPv6 address in brackets. Resolves nothing."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

EVERY_INTERFACE = ("*", "0.0.0.0", "::")


class Address(NamedTuple):
    host: str  # a name or a literal, IPv6 without brackets
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def parse_address(text: str) -> Address:
    """Raises ValueError, whose message says what is expected."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        _check_ipv6(host, text)
    elif ":" in host:
        raise ValueError(f"takes an IPv6 address in brackets, such as [fd00::1]:19888, got {text!r}")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ValueError(f"takes host:port, such as 10.0.0.1:19888, got {text!r}")
    if any(c.isspace() or c in "/;," for c in host):
        raise ValueError(f"takes host:port without a scheme or a path, got {text!r}")
    return Address(host, int(port))


def _check_ipv6(host: str, text: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError(f"takes an IPv6 address between the brackets, got {text!r}") from None
