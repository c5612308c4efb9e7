"""What machines of one server say to each other: msgspec structs, one a frame.

An agent (node 1 and up) says Hello, hears a Challenge, and sends Register under seal; then it is Accepted, or refused
in one sentence. After that the master gives orders and the agent reports; both send a Beat when they have nothing else
to say. Hello, Challenge and Refusal must stay readable for every later version.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 1

EntryPoint = Literal["engine", "worker"]


class Hello(msgspec.Struct, kw_only=True):
    """In the clear, first thing on a connection."""

    protocol: int
    version: str  # of xllm-npu
    nonce: bytes


class Challenge(msgspec.Struct, kw_only=True):
    nonce: bytes


class Refusal(msgspec.Struct, kw_only=True):
    message: str  # one sentence for people


class Identity(msgspec.Struct, kw_only=True, frozen=True):
    """What a machine is and how it is set; see identity.py for what must agree."""

    version: str
    torch: str
    platform: str
    devices: list[int]  # indices that it offers
    shares_devices: bool  # any number of ranks may be put on one of its devices
    nnodes: int
    model: str  # fingerprint
    settings: dict[str, str]  # those that must agree, as text


# Agent to master


class Register(msgspec.Struct, tag=True, kw_only=True):
    node_rank: int
    hostname: str
    address: str  # how the other machines reach this one
    reached: str  # the master's address, as this machine reaches it
    identity: Identity


class Started(msgspec.Struct, tag=True):
    child: int
    pid: int


class Exited(msgspec.Struct, tag=True):
    child: int
    how: str  # "ended with exit code 1", "was ended by SIGKILL"
    last_lines: str = ""  # of its standard error


class Ports(msgspec.Struct, tag=True):
    order: int
    ports: list[int]  # free ones, all different


class Leaving(msgspec.Struct, tag=True):
    reason: str  # "was stopped by SIGTERM"


# Master to agent


class Accepted(msgspec.Struct, tag=True):
    """Wait for orders."""


class Start(msgspec.Struct, tag=True):
    child: int  # the master's number for it
    entry: EntryPoint
    line: bytes  # EngineInit or WorkerInit as JSON


class Kill(msgspec.Struct, tag=True):
    child: int


class FindPorts(msgspec.Struct, tag=True):
    order: int
    count: int


class End(msgspec.Struct, tag=True):
    """The server ends; so does the agent, with everything it started."""

    failure: str  # "": it was asked to


# Both ways


class Beat(msgspec.Struct, tag=True):
    pass


AgentMessage = Register | Started | Exited | Ports | Leaving | Beat
MasterMessage = Accepted | Start | Kill | FindPorts | End | Beat
