"""Several machines on one: loopback addresses, or network namespaces where this user may make them.

`start_nodes` runs one `xllm-npu serve` on each, as users do; HTTP is on a Unix socket, which every namespace reaches.
The namespaces have the addresses that the documents use.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.server import ServerProcess, poll
from xllm_npu.master.cluster.network import free_ports


@dataclass(frozen=True)
class Machine:
    address: str
    prefix: tuple[str, ...] = ()  # of a command that is to run there


def loopback_machines(count: int = 2) -> list[Machine]:
    return [Machine(f"127.0.0.{number}") for number in range(1, count + 1)]


@contextlib.contextmanager
def network_machines() -> Iterator[list[Machine]]:
    """Two namespaces with one cable between them; skips the test where that is not allowed."""
    names = [f"xllm-{os.getpid()}-{number}" for number in (1, 2)]
    addresses = ["10.0.0.1", "10.0.0.2"]
    ends = [f"x{os.getpid() % 10**8}-{number}" for number in (1, 2)]  # at most 15 characters
    with ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "delete", name)
            _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
            for name, end, address in zip(names, ends, addresses):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                for device in (end, "lo"):
                    _ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield [Machine(address, ("ip", "netns", "exec", name)) for name, address in zip(names, addresses)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def start_nodes(
    model: str | Path, directory: Path, machines: Sequence[Machine], *flags: str,
    more: Sequence[Sequence[str]] = ((), ()),
) -> Iterator[list[ServerProcess]]:
    """All with the same flags, and `more` of each node's own. See `start_lines`."""
    master = f"{machines[0].address}:{free_ports('127.0.0.1', 1)[0]}"
    common = ("--nnodes", str(len(machines)), "--master-node-addr", master, *flags)
    lines = [[*common, "--node-rank", str(rank), "--node-addr", machine.address, *more[rank]]
             for rank, machine in enumerate(machines)]
    with start_lines(model, directory, machines, lines) as started:
        yield started


@contextlib.contextmanager
def start_lines(
    model: str | Path, directory: Path, machines: Sequence[Machine], lines: Sequence[Sequence[str]]
) -> Iterator[list[ServerProcess]]:
    """One process a machine with its line's flags, node 0 first; returns as soon as they are started.

    Leaving stops node 0 first, with which the others end, and asserts that nothing is left of any.
    """
    with ExitStack() as stack:
        started = []
        for rank in reversed(range(len(machines))):
            started.append(stack.enter_context(ServerProcess(
                model, directory / f"node{rank}", *lines[rank], ready=False, uds=True, prefix=machines[rank].prefix)))
        yield started[::-1]


def child_of(server: ServerProcess, module: str) -> psutil.Process:
    """Waits for a process that runs `module` below this one."""
    return poll(lambda: _find(server, module), f"{module} to start; stderr: {server.stderr}")


def _find(server: ServerProcess, module: str) -> psutil.Process | None:
    assert server.running, f"it ended: {server.stderr}"
    for process in server.tree()[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in process.cmdline():
                return process
    return None
