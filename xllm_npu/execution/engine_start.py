"""From settings to an engine whose workers are all loaded: rank 0 in this process, the others in theirs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xllm_npu.config.settings import Settings
from xllm_npu.execution.engine import Engine
from xllm_npu.execution.engine_memory import connect_memory
from xllm_npu.execution.engine_weights import EngineWeights
from xllm_npu.execution.rank import Rank, of_rank
from xllm_npu.execution.socket_directory import socket_parent
from xllm_npu.execution.worker import Worker
from xllm_npu.execution.worker_client import DirectWorker, InProcessWorker, WorkerClient
from xllm_npu.execution.worker_group import WorkerGroup
from xllm_npu.execution.worker_loader import LoadCompiler, LoadedWorker, Progress, check_cut, load_worker
from xllm_npu.execution.worker_messages import WorkerReady
from xllm_npu.memory.worker_memory_registry import WorkerMemoryRegistry
from xllm_npu.state.launch import EngineInit, local_slots
from xllm_npu.state.messages import EngineReady

MIB = 2**20


def local_init(settings: Settings, directory: str) -> EngineInit:
    """All ranks on this machine, for a caller without a server around it."""
    p, seed = settings.parallel, settings.execution.random_seed
    return EngineInit(
        settings=settings.model_dump_json(exclude_unset=True), requests="", outputs="", directory=directory,
        seed=time.time_ns() if seed < 0 else seed,
        slots=local_slots(p.tp_size * p.dp_size, max(settings.execution.device_id, 0)),
    )


def start_engine(settings: Settings, init: EngineInit | None, progress: Progress, *, overlap: bool,
                 grammars: LoadCompiler | None = None) -> tuple[Engine, EngineReady]:
    """Raises what loading raises on any rank, or how a rank died. Nothing is left running then.

    Without `init` all ranks are on this machine, and meet in a directory that goes when they are connected.
    `grammars`: what compiles them; without it the engine takes no request that has one.
    """
    if init is not None:
        return _start(settings, init, progress, overlap, grammars)
    directory = tempfile.mkdtemp(prefix="xllm-npu-", dir=socket_parent())
    try:
        return _start(settings, local_init(settings, directory), progress, overlap, grammars)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _start(settings: Settings, init: EngineInit, progress: Progress, overlap: bool, grammars: LoadCompiler | None
           ) -> tuple[Engine, EngineReady]:
    if not init.rendezvous:
        init.rendezvous = f"file://{init.directory}/rendezvous"
    init.ledgers = init.ledgers or init.directory
    rank = Rank(seed=init.seed, dp_rank=init.dp_rank, slot=init.slots[init.dp_rank * settings.parallel.tp_size],
                slots=tuple(init.slots), rendezvous=init.rendezvous, own_rendezvous=init.own_rendezvous,
                ledgers=init.ledgers, weights=of_rank(init.weights, 0), weights_from=of_rank(init.weights_from, 0),
                checkpoint=init.checkpoint)
    made: list[LoadedWorker] = []

    def make() -> Worker:
        made.append(load_worker(settings, rank, progress, grammars))
        return made[0].worker

    if settings.parallel.tp_size == 1:
        worker = _one_worker(make, overlap)
        ready = made[0].ready
        return Engine(worker, None, ready.block_size, connect_memory(made[0].memory, [], None), made[0].grammars,
                      _weights(init, settings, made[0], worker, None)), ready
    check_cut(settings, rank, progress)
    with _registry(init) as registry:
        client, group, others = _several_workers(settings, init, make)
        ready = made[0].ready
        ready.ranks = settings.parallel.tp_size
        ready.weight_loads += [other.weights for other in others]
        try:
            memory = connect_memory(made[0].memory, others, group, registry)
        except BaseException:
            group.close(patience=0)
            raise
    weights = _weights(init, settings, made[0], client, group)
    return Engine(client, group, ready.block_size, memory, made[0].grammars, weights), ready


def _weights(init: EngineInit, settings: Settings, first: LoadedWorker, client: WorkerClient, group: WorkerGroup | None
             ) -> EngineWeights:
    updater = first.worker.parts.updater
    assert updater is not None
    return EngineWeights(updater, client, group, init.checkpoint or settings.model.model)


@contextmanager
def _registry(init: EngineInit) -> Iterator[WorkerMemoryRegistry | None]:
    """Where workers on several machines register their memory, until they have."""
    if not init.memory_master:
        yield None
        return
    registry = WorkerMemoryRegistry(init.memory_master, init.memory_token)
    try:
        yield registry
    finally:
        registry.close()


def _one_worker(make: Callable[[], Worker], overlap: bool) -> WorkerClient:
    if not overlap:
        return DirectWorker(make())
    client = InProcessWorker(make)
    client.wait_made()
    return client


def _several_workers(
    settings: Settings, init: EngineInit, make: Callable[[], Worker]
) -> tuple[InProcessWorker, WorkerGroup, list[WorkerReady]]:
    """Rank 0 has a thread of its own whatever the loop is: a thread that is stuck cannot be woken, its caller can."""
    e = settings.execution
    client: InProcessWorker | None = None

    def on_failure(error: BaseException) -> None:
        if client is not None:
            client.fail(error)

    group = WorkerGroup(init, settings.parallel.tp_size, settings.distributed.collective_timeout,
                        e.input_shm_size * MIB if e.enable_shm else 0, on_failure)
    try:
        group.connect()
        client = InProcessWorker(make)
        if group.failure is not None:
            raise group.failure
        try:
            client.wait_made()
        except Exception as error:
            raise group.cause(error) from error
        group.busy_since = lambda: client.busy_since if client is not None else None
        others = group.wait_ready()
    except BaseException:
        group.close(patience=0)  # those that still load would hear nothing
        raise
    return client, group, others
