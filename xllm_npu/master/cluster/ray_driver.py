"""Agents as Ray actors: `python -m xllm_npu.master.cluster.ray_driver`, a child of the HTTP process.

A process of its own, because Ray takes over much of the process that it is initialised in. It connects to a running Ray
cluster, reports what that offers, and on the HTTP process's order reserves a placement group with one bundle a device
and runs one agent in each. Its standard input carries the orders and is its parent's sign of life: when it ends, actors
and placement group go, and Ray does the same if this process is killed. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import sys
import threading
import time
from typing import Any

import msgspec

STDIN, STDOUT, STDERR = 0, 1, 2
SAY_SECONDS = 5.0
CONNECT_SECONDS = 5.0
# Ray's name for a device of each platform; the CPU's are cores.
RESOURCES = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}


class Connect(msgspec.Struct, tag=True):
    """First order: find the cluster."""

    platform: str  # or "auto"


class Place(msgspec.Struct, tag=True, kw_only=True):
    """Second order: start the agents."""

    settings: str  # JSON, for all of them
    secret: str
    master: str  # host:port
    count: int
    cores: int  # a bundle, on the CPU
    timeout: float  # seconds


class Connected(msgspec.Struct, tag=True):
    platform: str
    address: str  # of this machine, as the cluster's machines reach it


class Waiting(msgspec.Struct, tag=True):
    message: str


class Placed(msgspec.Struct, tag=True):
    nodes: int


class Failed(msgspec.Struct, tag=True):
    message: str


Order = Connect | Place
Report = Connected | Waiting | Placed | Failed


class DriverError(RuntimeError):
    """Ray cannot do it; the message says what is missing."""


class AgentActor:
    """One device's agent. The actor ends with its method."""

    def run(self, settings_json: str, secret: str, master: str, node: int, nnodes: int) -> str | None:
        import ray

        from xllm_npu.config.settings import Settings
        from xllm_npu.execution.device_probe import probe
        from xllm_npu.log import setup_logging
        from xllm_npu.master.cluster.agent import NodeAgent
        from xllm_npu.master.cluster.identity import identify

        settings = with_distributed(
            Settings.model_validate_json(settings_json), node_rank=node, nnodes=nnodes, master_node_addr=master,
            node_addr=ray.util.get_node_ip_address(), cluster_secret=secret or None)
        setup_logging(settings.service.log_level, process=f"node {node}", form=settings.service.log_format)
        return asyncio.run(NodeAgent(settings, identify(settings, probe(settings.execution.platform))).run())


def with_distributed(settings: Any, **values: Any) -> Any:
    """The same settings on another machine."""
    return settings.model_copy(update={"distributed": settings.distributed.model_copy(update=values)})


class Driver:
    def __init__(self, report: Any) -> None:
        self._report = report
        self._group: Any = None
        self._actors: list[Any] = []

    def connect(self, order: Connect) -> None:
        try:
            import ray
        except ImportError:
            raise DriverError("--placement=ray needs Ray on every machine: pip install 'xllm-npu[ray]'.") from None
        self._ray = ray
        address = os.environ.get("RAY_ADDRESS") or "auto"
        try:
            _check_reachable(address)
            ray.init(address=address, configure_logging=False, log_to_driver=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise DriverError(f"No Ray cluster can be connected to ({' '.join(str(error).split())[:200]}): start one "
                              "with `ray start --head`, or name one in RAY_ADDRESS.") from None
        found = ray.cluster_resources()
        platform = order.platform
        if platform == "auto":
            platform = next(name for name in RESOURCES if name == "cpu" or found.get(RESOURCES[name], 0) >= 1)
        if platform not in RESOURCES:
            raise DriverError(f"Ray has no name for devices of platform {platform}: --placement=ray needs "
                              f"--platform to be one of {', '.join(RESOURCES)}.")
        self._platform = platform
        self._report(Connected(platform, ray.util.get_node_ip_address()))

    def place(self, order: Place, ended: threading.Event) -> None:
        """Reserve and start; then watch the agents until one of them ends."""
        name = RESOURCES[self._platform]
        bundle = {name: float(order.cores if self._platform == "cpu" else 1)}
        self._group = self._ray.util.placement_group([bundle] * order.count, strategy="PACK")
        self._wait_for_group(bundle, order, ended)
        if ended.is_set():
            return
        runs = self._start_agents(bundle, order)
        self._report(Placed(order.count))
        while not ended.wait(0.5):
            done, _ = self._ray.wait(runs, num_returns=1, timeout=0)
            if done:
                raise DriverError(self._how_it_ended(done[0], runs.index(done[0]) + 1))

    def _wait_for_group(self, bundle: dict[str, float], order: Place, ended: threading.Event) -> None:
        ready, began, said = self._group.ready(), time.monotonic(), 0.0
        while not self._ray.wait([ready], timeout=0.5)[0]:
            now = time.monotonic()
            if ended.is_set():
                return
            if now - began > order.timeout:
                raise DriverError(f"{self._what_is_missing(bundle, order.count)} They were not to be had within "
                                  f"{order.timeout:g} s.")
            if now - said > SAY_SECONDS:
                said = now
                self._report(Waiting(self._what_is_missing(bundle, order.count)))

    def _what_is_missing(self, bundle: dict[str, float], count: int) -> str:
        (name, amount), = bundle.items()
        total, free = (found.get(name, 0) for found in (self._ray.cluster_resources(), self._ray.available_resources()))
        each = f"{count} actors with {amount:g} {name} each"
        return f"{each} are needed, and Ray's cluster has {total:g} {name}, of which {free:g} are free."

    def _start_agents(self, bundle: dict[str, float], order: Place) -> list[Any]:
        """Neighbouring ranks on one machine, as far as there is room; this machine's first."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        places = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        here = self._ray.get_runtime_context().get_node_id()
        bundles = sorted(places, key=lambda index: (places[index] != here, places[index], index))
        resources = dict(bundle)
        options = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
        actor_class = self._ray.remote(AgentActor)
        runs = []
        for node, index in enumerate(bundles, 1):
            actor = actor_class.options(
                **options, max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            ).remote()
            self._actors.append(actor)
            runs.append(actor.run.remote(order.settings, order.secret, order.master, node, order.count + 1))
        return runs

    def _how_it_ended(self, run: Any, node: int) -> str:
        try:
            said = self._ray.get(run)
        except Exception as error:  # whatever Ray raises for an actor that died or raised
            words = str(error).strip().splitlines() or [type(error).__name__]
            return f"The Ray actor of node {node} failed: {words[-1]}"
        return str(said or f"The agent of node {node} ended.")

    def close(self) -> None:
        if not hasattr(self, "_ray") or not self._ray.is_initialized():
            return
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes. Raises OSError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def main() -> int:
    # Whatever Ray prints belongs to people: reports leave through a descriptor of their own.
    out = os.fdopen(os.dup(STDOUT), "wb", buffering=0)
    os.dup2(STDERR, STDOUT)
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    ended = threading.Event()
    threading.Thread(target=_read_orders, args=(orders, ended), name="orders", daemon=True).start()
    driver = Driver(lambda report: out.write(msgspec.json.encode(report) + b"\n"))
    try:
        while not ended.is_set():
            try:
                order = orders.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(order, Connect):
                driver.connect(order)
            else:
                driver.place(order, ended)
    except DriverError as error:
        out.write(msgspec.json.encode(Failed(str(error))) + b"\n")
        ended.wait(30)  # the parent lets go when it has told everybody
    except BrokenPipeError:
        pass  # the parent is gone
    finally:
        driver.close()
    return 0


def _read_orders(orders: queue.SimpleQueue[Order], ended: threading.Event) -> None:
    decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
    with open(STDIN, "rb", buffering=0, closefd=False) as stdin:
        for line in stdin:
            orders.put(decoder.decode(line))
    ended.set()


if __name__ == "__main__":
    sys.exit(main())
