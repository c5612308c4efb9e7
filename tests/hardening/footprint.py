"""What a server holds when it is idle: to be the same before and after whatever was done to it.

Read from the system (processes, descriptors, sockets, memory) and from the server itself (`/status`, `/metrics`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import httpx
import psutil

from tests.support.server import ServerProcess, poll

MIB = 2**20


@dataclass(frozen=True)
class Footprint:
    processes: int
    descriptors: tuple[int, ...]  # of each process, the HTTP process first
    connections: int  # that the HTTP process has with clients
    tasks: int  # asyncio tasks of the HTTP process
    requests: int  # that run, wait or have not ended their response
    memory: tuple[int, ...]  # resident bytes of each process

    def excess(self, before: Footprint) -> dict[str, int]:
        """What is more than it was, memory aside."""
        descriptors = [a - b for a, b in zip(self.descriptors, before.descriptors, strict=False)]
        more = {"processes": self.processes - before.processes, "connections": self.connections - before.connections,
                "tasks": self.tasks - before.tasks, "requests": self.requests - before.requests,
                "descriptors": max(descriptors)}
        return {what: count for what, count in more.items() if count > 0}

    def grown(self, before: Footprint) -> int:
        """MiB by which the process that has grown most has grown."""
        return max(a - b for a, b in zip(self.memory, before.memory, strict=False)) // MIB


def footprint(server: ServerProcess, admin_url: str) -> Footprint:
    http = psutil.Process(server.pid)
    processes = [http]
    for child in http.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                processes.append(child)
    connections = [c for c in http.net_connections("tcp") if c.status != psutil.CONN_LISTEN]
    # A connection of its own each time, which is closed when it has answered: never in the figures.
    status = httpx.get(f"{admin_url}/status", headers={"Connection": "close"}, timeout=30).json()
    load = httpx.get(f"{server.url}/load", headers={"Connection": "close"}, timeout=30).json()
    return Footprint(
        len(processes), tuple(p.num_fds() for p in processes), len(connections), status["tasks"],
        load["server_load"] + sum(model["requests"] for model in status["models"]),
        tuple(p.memory_info().rss for p in processes))


def settled(server: ServerProcess, admin_url: str, before: Footprint | None = None) -> Footprint:
    """Once the engine is idle, and where there is a `before`, once there is nothing more than then."""
    server.wait_idle()
    if before is None:
        return footprint(server, admin_url)
    last: list[Footprint] = []

    def as_before() -> bool:
        last[:] = [footprint(server, admin_url)]
        return not last[0].excess(before)

    try:
        poll(as_before, "the footprint that it had")
    except AssertionError:
        raise AssertionError(f"left behind: {last[0].excess(before)}") from None
    return last[0]
