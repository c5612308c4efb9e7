"""Several machines: the interface and address that HCCL and gloo are told to use, and the devices' own network.

HCCL_IF_IP comes before HCCL_SOCKET_IFNAME; without either, HCCL takes the first interface by name, and without
GLOO_SOCKET_IFNAME gloo takes the one that the host's name resolves to. `serve` sets what the user has not, from the
address at which the machines reach each other. Source: CANN's HCCL guide.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xllm_npu.config.address import parse_address
from xllm_npu.config.settings import spans_machines
from xllm_npu.doctor.finding import Finding, note, ok, problem
from xllm_npu.doctor.machine import Machine

if TYPE_CHECKING:
    from xllm_npu.config.settings import Settings

INTERFACE_VARIABLES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel")
DEVICE_NETWORK = "/etc/hccn.conf"

Interfaces = dict[str, tuple[str, ...]]


def examine_cluster(machine: Machine, settings: Settings, *, devices: bool) -> Iterator[Finding]:
    """Nothing for a single machine. `devices`: ranks are on NPUs."""
    if not spans_machines(settings):
        return
    interfaces = machine.interfaces()
    wrong = [*_interfaces(machine, interfaces, devices), *_address(machine, interfaces, devices)]
    yield from wrong or _chosen(machine, interfaces, settings, devices)
    yield from _master(settings)
    if devices and machine.read(DEVICE_NETWORK) is None:
        yield note(
            "cluster.device-network", "network", f"{DEVICE_NETWORK} cannot be read",
            "devices of A2 servers reach those of other machines by addresses that stand there",
            "set them with hccn_tool; in a container, mount the file and "
            "/usr/local/Ascend/driver/tools/hccn_tool",
        )  # fmt: skip


def interfaces_named(pattern: str, interfaces: Interfaces) -> list[str]:
    """Those that HCCL_SOCKET_IFNAME means: `eth` prefix, `=eth0` name; with `^` in front, all others."""
    others = pattern.startswith("^")
    names = pattern.removeprefix("^")
    exact = names.startswith("=")
    listed = tuple(name.strip() for name in names.removeprefix("=").split(",") if name.strip())
    return [name for name in interfaces if ((name in listed) if exact else name.startswith(listed)) != others]


def _interfaces(machine: Machine, interfaces: Interfaces, devices: bool) -> Iterator[Finding]:
    for variable in INTERFACE_VARIABLES[0 if devices else 1 :]:
        value = machine.environment.get(variable)
        if value and not interfaces_named(value if "HCCL" in variable else f"={value}", interfaces):
            yield problem(
                "cluster.interface", "network", f"{variable}={value}, and there is no such interface",
                "ranks on this machine could not be reached", f"name one of {', '.join(_real(interfaces))}",
            )  # fmt: skip


def _address(machine: Machine, interfaces: Interfaces, devices: bool) -> Iterator[Finding]:
    address = machine.environment.get("HCCL_IF_IP") if devices else None
    if not address:
        return
    owner = next((name for name, own in interfaces.items() if address in own), None)
    named = machine.environment.get("HCCL_SOCKET_IFNAME")
    if owner is None:
        yield problem(
            "cluster.address", "network", f"HCCL_IF_IP={address} is not an address of this machine",
            "HCCL listens there; the variable is different on every machine",
            f"give one of {', '.join(a for n in _real(interfaces) for a in interfaces[n])}",
        )  # fmt: skip
    elif named and owner not in interfaces_named(named, interfaces):
        yield note(
            "cluster.disagree", "network", f"HCCL_IF_IP={address} is on {owner}, and HCCL_SOCKET_IFNAME={named}",
            "the address wins", "make them agree, or unset one",
        )  # fmt: skip


def _chosen(machine: Machine, interfaces: Interfaces, settings: Settings, devices: bool) -> Iterator[Finding]:
    wanted = ("HCCL_IF_IP", *INTERFACE_VARIABLES) if devices else INTERFACE_VARIABLES[1:]
    unset = [name for name in wanted if not machine.environment.get(name)]
    real, own = _real(interfaces), settings.distributed.node_addr
    if unset and not own and len(real) > 1:
        yield note(
            "cluster.unset", "network", f"{', '.join(unset)} not set, and there are {', '.join(real)}",
            "serve takes the interface by which this machine reaches node 0, which may not be the fastest",
            "set them, or give --node-addr this machine's address on the right network",
        )  # fmt: skip
    else:
        yield ok("cluster", "network", own or ", ".join(real) or "the loopback only")


def _master(settings: Settings) -> Iterator[Finding]:
    host = parse_address(settings.distributed.master_node_addr).host
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return
    if loopback and settings.distributed.nnodes > 1:
        yield note(
            "cluster.loopback", "network", f"--master-node-addr {settings.distributed.master_node_addr}",
            "only processes of this machine reach that", "give an address of node 0 that all machines reach",
        )  # fmt: skip


def _real(interfaces: Interfaces) -> list[str]:
    return [name for name, addresses in interfaces.items() if addresses and not name.startswith(VIRTUAL)]
