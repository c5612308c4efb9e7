"""Which URLs media may come from: one strict reading, so that no two parsers can disagree on the host."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

MAX_URL_CHARS = 4096
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# scheme://host[:port][/path][?query][#fragment], without a user name; nothing else.
_URL = re.compile(r"(https?)://(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::([0-9]{1,5}))?"
                  r"([/?][\x21\x22\x24-\x7e]*)?(?:#[\x21-\x7e]*)?\Z", re.IGNORECASE | re.ASCII)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
# Public by their registration, and yet the inside of a network: translations to IPv4, tunnels, clouds' own servers.
_INSIDE = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96",
                                           "192.88.99.0/24", "168.63.129.16/32")))


class MediaRefused(ValueError):
    """The media cannot be had; the message is for the client and says why."""


@dataclass(slots=True, frozen=True)
class MediaUrl:
    text: str
    secure: bool
    host: str  # lower case; of an address, without brackets
    port: int
    path: str  # with the query
    address: Address | None  # where the host is one

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"


def parse_media_url(url: str) -> MediaUrl:
    """Raises MediaRefused."""
    if len(url) > MAX_URL_CHARS:
        raise MediaRefused(f"The media's URL is longer than {MAX_URL_CHARS} characters.")
    if not url.isascii():
        url = _to_ascii(url)
    match = _URL.match(url)
    if match is None or "\\" in url:
        raise MediaRefused("The media's URL must be a plain http or https URL, without user name, blanks and "
                           "backslashes.")
    secure, host = match[1].lower() == "https", match[2].lower().removesuffix(".")
    port = int(match[3]) if match[3] else (443 if secure else 80)
    path = match[4] or "/"
    return MediaUrl(url.partition("#")[0], secure, host.strip("[]"), port, path if path[0] == "/" else "/" + path,
                    _address(host))


def _to_ascii(url: str) -> str:
    """The path percent-encoded; a host that is not ASCII is refused, as it would need a second reading."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if not host.isascii():
        raise MediaRefused("The media's host must be written in ASCII (xn--...).")
    quoted = "".join(c if c.isascii() else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "replace"))
                     for c in path)
    return scheme + separator + host + slash + quoted


def _address(host: str) -> Address | None:
    """None for a name. What only some readers take for an address (0x7f.1, 2130706433, 010.0.0.1) is refused."""
    if host.startswith("["):
        return _literal(host[1:-1])
    labels = host.split(".")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        return _literal(host)
    if not all(map(_LABEL.match, labels)):
        raise MediaRefused("The media's host is malformed.")
    return None


def _literal(text: str) -> Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise MediaRefused("The media's host is neither a name nor a plain IP address.") from None


def is_public(address: Address) -> bool:
    """Whether it is an address of the open Internet, in whatever notation the inside may hide."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    inside = any(address.version == net.version and address in net for net in _INSIDE)
    return address.is_global and not address.is_multicast and not inside
