"""The HTTP process's end of all engine processes: one a data-parallel rank, seen from above as one engine.

Starts them together, tells that they are ready when all are, sends each request to one of them and its abort after
it, and ends all when one dies. The sockets lie in a directory that only this user can enter; it goes when the engines
go. Knows neither text nor HTTP; everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from xllm_npu.config.settings import Settings
from xllm_npu.execution.socket_directory import socket_parent
from xllm_npu.master.dp_router import Affinity, DpRouter
from xllm_npu.master.engine_client import ENGINE, Clue, Ending, EngineClient
from xllm_npu.master.engine_plan import EnginePlan
from xllm_npu.state.messages import (
    SEQUENCES_PER_REQUEST,
    AbortRequest,
    AddRequest,
    CommandDone,
    EngineCommand,
    EngineMessage,
    EngineProgress,
    EngineReady,
    ResetPrefixCache,
    Residency,
    ResidencyMessage,
    Resume,
    Sleep,
    StepOutputs,
    StepTogether,
    UpdateWeights,
)

CAUSE_SECONDS = 0.5  # for the end that caused another one to be noticed

# What may differ between the ranks' EngineReady: how long they took and what their devices had left.
MAY_DIFFER = frozenset({
    "device", "load_seconds", "num_kv_blocks", "kv_cache_bytes", "weight_bytes", "max_model_len", "tokenizer_dir",
    "weight_loads", "owned_pages",
})


@dataclass(slots=True, frozen=True)
class EngineEvents:
    """Whom to tell. Called on the event loop, never after `stop` or `kill`."""

    on_progress: Callable[[EngineProgress], None]
    on_ready: Callable[[Sequence[EngineReady]], None]  # all are, one entry a rank; they agree on what must be the same
    on_outputs: Callable[[int, StepOutputs], None]  # with the rank they come from
    on_exit: Callable[[str], None]  # one is gone, and so are the others; once


class EnginesGone(RuntimeError):
    """They ended before they answered; the message says how."""


class CommandFailed(RuntimeError):
    """An engine could not do it; the message says why."""


class EngineGroup:
    def __init__(self, settings: Settings, plans: Sequence[EnginePlan], directory: Path, events: EngineEvents) -> None:
        """`directory`: as in the plans; it does not exist yet. Plans may come later, by `place`."""
        self._settings = settings
        self._directory = directory
        self._events = events
        self.place(plans)
        self._ready: dict[int, EngineReady] = {}
        self._router: DpRouter | None = None
        self._together = False
        self._total_sent = 0
        self._endings: list[Ending] = []
        self._asking: dict[int, asyncio.Future[Residency]] = {}  # by rank
        self._commanding = asyncio.Lock()
        self._commanded: dict[int, asyncio.Future[CommandDone]] = {}  # by rank
        self._over = False

    def place(self, plans: Sequence[EnginePlan]) -> None:
        """Which engines there will be; before `start`."""
        self._clients = [
            EngineClient(plan.launcher, plan.init, partial(self._on_message, rank), self._on_exit,
                         f"{ENGINE} of rank {rank}" if len(plans) > 1 else ENGINE)
            for rank, plan in enumerate(plans)
        ]
        self._has_local_engine = any(plan.init.node == 0 for plan in plans)
        self._progress = SlowestStage(len(plans))

    @property
    def alive(self) -> bool:
        return bool(self._clients) and all(client.alive for client in self._clients)

    @property
    def lacked_memory(self) -> bool:
        """One has ended, and might not have with more of its device's memory."""
        return any(ending.lacked_memory for ending in self._endings)

    async def start(self) -> None:
        """Start all of them; returns before the model is loaded. Raises OSError."""
        if self._over:  # `fail` was faster
            return
        launched = await asyncio.gather(*(client.launch() for client in self._clients), return_exceptions=True)
        for failure in launched:
            if failure is not None:
                raise failure
        if self._over:
            for client in self._clients:
                client.kill()
            return
        if self._has_local_engine:
            # After the processes, which know its name: whenever this process is killed, they remove it.
            self._directory.mkdir(mode=0o700, exist_ok=True)  # an engine may be faster
        for client in self._clients:
            client.listen()

    # Requests

    def send(self, request: AddRequest, rank: int | None = None) -> int:
        """To `rank`, or to the one that has the most room for it; which that was."""
        assert self._router is not None, "a request before the engines are ready"
        rank = self._router.place(request, rank)
        self._clients[rank].send(request)
        if self._together:  # the others must step with it
            self._total_sent += 1
            for client in self._clients:
                client.send(StepTogether(self._total_sent))
        return rank

    def abort(self, message: AbortRequest) -> None:
        """Each key to the engine that has it; those of requests that are over are nobody's."""
        if self._router is None:
            return
        keys: defaultdict[int, list[int]] = defaultdict(list)
        for key in message.keys:
            rank = self._router.rank_of(key // SEQUENCES_PER_REQUEST)
            if rank is not None:
                keys[rank].append(key)
        for rank, own in keys.items():
            self._clients[rank].send(AbortRequest(own, message.reason))

    def end(self, request_id: int) -> None:
        """The request is over, after its abort if there was one. To be called for each that was sent."""
        if self._router is not None:
            self._router.end(request_id)

    # Pauses and sleep

    async def ask(self, message: ResidencyMessage, ranks: Sequence[int] | None = None) -> dict[int, Residency]:
        """Have engines do it, all of them unless `ranks` says which; their answers by rank, when all have answered.

        One call at a time. Raises EnginesGone if they end first.
        """
        assert not self._asking, "engines are asked one thing after the other"
        chosen = range(len(self._clients)) if ranks is None else ranks
        if self._over or not self.alive:
            raise EnginesGone("The engine process has ended.")
        if isinstance(message, Sleep | UpdateWeights) and self._router is not None:
            self._router.forget_prefixes()
        loop = asyncio.get_running_loop()
        self._asking = {rank: loop.create_future() for rank in chosen}
        try:
            for rank in chosen:
                self._clients[rank].send(message)
            if self._together and isinstance(message, Resume):  # which all count, and step then if one has work
                assert ranks is None, "engines that step together resume together"
                self._total_sent += len(self._clients)
                for client in self._clients:
                    client.send(StepTogether(self._total_sent))
            answers = await asyncio.gather(*self._asking.values(), return_exceptions=True)
        finally:
            self._asking = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return {rank: answer for rank, answer in zip(chosen, answers) if isinstance(answer, Residency)}

    async def command(self, message: EngineCommand) -> None:
        """Have all engines do it. Raises EnginesGone if they end first, CommandFailed with what the first one says."""
        async with self._commanding:
            if self._over or not self.alive:
                raise EnginesGone("The engine process has ended.")
            if isinstance(message, ResetPrefixCache) and self._router is not None:
                self._router.forget_prefixes()
            loop = asyncio.get_running_loop()
            self._commanded = {rank: loop.create_future() for rank in range(len(self._clients))}
            try:
                for client in self._clients:
                    client.send(message)
                answers = await asyncio.gather(*self._commanded.values())
            finally:
                self._commanded = {}
        for answer in answers:
            if answer.error:
                raise CommandFailed(answer.error)

    def _end_asking(self, reason: str) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._asking.values(), *self._commanded.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(EnginesGone(reason))

    # What they say

    def _on_message(self, rank: int, message: EngineMessage) -> None:
        if isinstance(message, StepOutputs):
            self._on_outputs(rank, message)
        elif isinstance(message, Residency):
            future = self._asking.get(rank)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, CommandDone):
            command = self._commanded.get(rank)
            if command is not None and not command.done():
                command.set_result(message)
        elif isinstance(message, EngineProgress):
            merged = self._progress.update(rank, message)
            if merged is not None:
                self._events.on_progress(merged)
        elif isinstance(message, EngineReady):
            self._ready[rank] = message
            self._progress.finish(rank)
            if len(self._ready) == len(self._clients):
                self._on_all_ready([self._ready[r] for r in range(len(self._clients))])

    def _on_outputs(self, rank: int, outputs: StepOutputs) -> None:
        assert self._router is not None, "outputs before any request"
        for info in outputs.prompts:
            self._router.on_first_token(info.request_id)
        if outputs.stats is not None:
            self._router.on_figures(rank, outputs.stats.free_blocks)
        self._events.on_outputs(rank, outputs)

    def _on_all_ready(self, ready: list[EngineReady]) -> None:
        difference = disagreement(ready)
        if difference is not None:
            self.fail(difference)
            return
        parallel = self._settings.parallel
        affinity = None
        if parallel.enable_prefix_cache_aware_dp_routing:
            affinity = Affinity(parallel.prefix_cache_aware_dp_routing_match_threshold,
                                parallel.prefix_cache_aware_dp_routing_imbalance_threshold)
        self._router = DpRouter(
            [r.num_kv_blocks for r in ready], max_seqs=ready[0].max_seqs, block_size=ready[0].block_size,
            affinity=affinity, prefix_seed=self._settings.kv_cache.xxh3_128bits_seed)
        self._together = ready[0].steps_together
        self._events.on_ready(ready)

    # The end

    def _on_exit(self, ending: Ending) -> None:
        """One is gone. Where ranks compute together the others fail for it, perhaps sooner than it is noticed."""
        self._endings.append(ending)
        if not self._together or ending.clue is not Clue.FAILED:
            self.fail(ending.reason)
        elif len(self._endings) == 1:
            asyncio.get_running_loop().call_later(
                CAUSE_SECONDS, lambda: self.fail(min(self._endings, key=lambda e: e.clue).reason))

    def fail(self, reason: str) -> None:
        """For whoever finds out that one is gone. All end then: nobody could use what is left, and it may wait for
        the one that is gone.
        """
        if self._over:
            return
        self._over = True
        for client in self._clients:
            client.kill()
        self._end_asking(reason)
        self._events.on_exit(reason)

    async def stop(self, patience: float) -> None:
        """Ask them to end, wait, and make sure. Nothing of them is left afterwards."""
        self._over = True
        self._end_asking("The server is shutting down.")
        await asyncio.gather(*(client.stop(patience) for client in self._clients))
        self._remove_directory()

    def kill(self) -> None:
        """At once, without waiting; for a second Ctrl-C."""
        self._over = True
        self._end_asking("The server is shutting down.")
        for client in self._clients:
            client.kill()
        self._remove_directory()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def new_directory() -> Path:
    """A name for the sockets' directory that nobody can guess; it is not made yet."""
    return Path(socket_parent()) / f"xllm-npu-{secrets.token_urlsafe(6)}"


def disagreement(ready: Sequence[EngineReady]) -> str | None:
    """Why these engines cannot serve one model together, or None."""
    first = msgspec.structs.asdict(ready[0])
    for rank, other in enumerate(ready[1:], 1):
        for name, value in msgspec.structs.asdict(other).items():
            if name not in MAY_DIFFER and value != first[name]:
                return (f"The engines of ranks 0 and {rank} differ in {name}: {first[name]} and {value}. "
                        "Give all of them the same model, the same settings and the same software.")
    return None


def as_one(ready: Sequence[EngineReady]) -> EngineReady:
    """What a request may rely on, whichever engine it goes to; bytes are sums."""
    return msgspec.structs.replace(
        ready[0],
        device=", ".join(dict.fromkeys(r.device for r in ready)),
        num_kv_blocks=min(r.num_kv_blocks for r in ready),
        max_model_len=min(r.max_model_len for r in ready),
        weight_bytes=sum(r.weight_bytes for r in ready),
        kv_cache_bytes=sum(r.kv_cache_bytes for r in ready),
        load_seconds=max(r.load_seconds for r in ready),
        engines=len(ready),
        ranks=sum(r.ranks for r in ready),
        weight_loads=[msgspec.structs.replace(load, rank=dp_rank * r.ranks + load.rank)
                      for dp_rank, r in enumerate(ready) for load in r.weight_loads],
    )


class SlowestStage:
    """Several engines' start-up progress as one: the stage that the last of them is in."""

    def __init__(self, num_ranks: int) -> None:
        self._stages: list[str] = []  # as they were first seen, which is the order of a start
        self._latest: list[EngineProgress | None] = [None] * num_ranks
        self._shown: EngineProgress | None = None
        self._done: set[int] = set()

    def update(self, rank: int, progress: EngineProgress) -> EngineProgress | None:
        """What to show now, if this report changes it: the slowest rank's, and of equal stages the least done."""
        if progress.stage not in self._stages:
            self._stages.append(progress.stage)
        self._latest[rank] = progress
        loading = [p for r, p in enumerate(self._latest) if p is not None and r not in self._done]
        slowest = min(loading, key=lambda p: (self._stages.index(p.stage), p.done / max(p.total, 1)))
        if slowest == self._shown:
            return None
        self._shown = slowest
        return slowest

    def finish(self, rank: int) -> None:
        self._done.add(rank)
