"""Addresses and interfaces of this machine."""

import socket

import pytest

from xllm_npu.config.address import Address
from xllm_npu.master.cluster import network
from xllm_npu.master.cluster.network import (
    AddressError,
    collective_environment,
    endpoint,
    free_ports,
    interface_of,
    listening_address,
    own_address,
    source_address,
)


def test_interfaces():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.0.2") == "lo"  # not assigned, but of its network
    assert interface_of("203.0.113.9") is None
    assert collective_environment("203.0.113.9") == {}
    assert collective_environment("127.0.0.2")["GLOO_SOCKET_IFNAME"] == "lo"


def test_ports_can_be_bound():
    for port in free_ports("127.0.0.2", 5):
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", port))


def test_endpoints():
    assert endpoint("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert endpoint("fd00::1", 5) == "tcp://[fd00::1]:5"


def test_source_address():
    assert source_address(Address("127.0.0.1", 9)) == "127.0.0.1"


def test_own_address():
    assert own_address("127.0.0.2") == "127.0.0.2"
    for wrong in ("203.0.113.9", "0.0.0.0"):
        with pytest.raises(AddressError, match="is no address of this machine"):
            own_address(wrong)


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("0.0.0.0", None), ("*", None), ("203.0.113.9", None)],
)
def test_where_to_listen(host, bound):
    assert listening_address(host) == bound


def test_a_machine_whose_name_is_a_loopback_address_on_itself(monkeypatch):
    monkeypatch.setattr(network, "resolve", lambda _: "127.0.1.1")
    assert listening_address("node-0") is None
