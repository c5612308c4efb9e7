"""This machine's addresses and ports, as other machines will use them. Asks the operating system, sends nothing."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import ExitStack
from typing import Literal

import psutil

from xllm_npu.config.address import EVERY_INTERFACE, Address, bracketed


class AddressError(RuntimeError):
    """An address cannot be used; the message says which and why."""


def resolve(host: str) -> str:
    """A literal address of `host`, IPv4 before IPv6. Blocks on a name server. Raises AddressError."""
    if host in EVERY_INTERFACE:
        return host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"The address {host} cannot be resolved: {error.strerror or error}.") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def endpoint(host: str, port: int | Literal["*"]) -> str:
    """`*`: any port that is free where it is bound."""
    return f"tcp://{bracketed(host)}:{port}"


def is_local(host: str) -> bool:
    """Can a socket be bound to this literal address?"""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def own_address(given: str) -> str:
    """--node-addr as a literal address. Raises AddressError if it is none of this machine's."""
    host = resolve(given)
    if host in EVERY_INTERFACE or not is_local(host):
        raise AddressError(f"--node-addr={given} is no address of this machine: name one that the others reach.")
    return host


def listening_address(host: str) -> str | None:
    """What to bind to, for others to reach `host`: its literal address, or None for all interfaces.

    A machine's name often means a loopback address on that machine itself, and another one elsewhere; and behind an
    address translation the address is another machine's. Raises AddressError.
    """
    literal = resolve(host)
    if literal in EVERY_INTERFACE:
        return None
    named = literal != host and host != "localhost"
    if (named and ipaddress.ip_address(literal.partition("%")[0]).is_loopback) or not is_local(literal):
        return None
    return literal


def source_address(target: Address) -> str:
    """The address from which this machine reaches the (literal) target. Raises AddressError."""
    with socket.socket(_family(target.host), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target.host, target.port))
        except OSError as error:
            raise AddressError(f"There is no route to {target}: {error.strerror or error}.") from None
        return str(probe.getsockname()[0])


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports that nobody listens on at the literal address `host`, at this moment."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket(_family(host), socket.SOCK_STREAM))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
    return ports


def collective_environment(host: str) -> dict[str, str]:
    """Environment variables that make gloo, NCCL and HCCL talk over the interface of address `host`.

    Left alone they take the one that this machine's name resolves to, which on many machines is the loopback.
    """
    interface = interface_of(host)
    if interface is None:
        return {}
    named = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), interface)
    return {**named, "HCCL_IF_IP": host}


def interface_of(host: str) -> str | None:
    """The network interface that has the address, or else one whose network it belongs to."""
    address, near = ipaddress.ip_address(host.partition("%")[0]), None
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or not entry.address:
                continue
            own = ipaddress.ip_address(entry.address.partition("%")[0])
            if own == address:
                return name
            if own.version == address.version and entry.netmask and address in _network(entry):
                near = near or name
    return near


def _network(entry: object) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    address, netmask = entry.address.partition("%")[0], entry.netmask  # type: ignore[attr-defined]
    if ":" in address:
        netmask = bin(int(ipaddress.IPv6Address(netmask))).count("1")
    return ipaddress.ip_network(f"{address}/{netmask}", strict=False)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
