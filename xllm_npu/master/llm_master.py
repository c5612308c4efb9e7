"""The composition root of the HTTP process: a model's text, request factory, output dispatcher, engines.

`service/` talks to this and to nothing below it. Runs on one asyncio event loop.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xllm_npu.config.settings import Settings, served_model_names, spans_machines
from xllm_npu.master.adapters import AdapterError, Adapters
from xllm_npu.master.beam_searches import BeamSearches
from xllm_npu.master.engine_figures import EngineFigures
from xllm_npu.master.engine_group import EngineEvents, EngineGroup, EnginesGone, as_one, new_directory
from xllm_npu.master.engine_plan import plan_on_one_machine
from xllm_npu.master.model_residency import ModelResidency, ResidencyEvents, ResidencyState, ServedWeights
from xllm_npu.master.model_text import ModelText, check_parsers
from xllm_npu.master.request_stream import RequestStream
from xllm_npu.master.request_timing import RequestTiming
from xllm_npu.master.residency_error import ResidencyError, check_can_update
from xllm_npu.master.restart_policy import RestartPolicy
from xllm_npu.metrics import Metrics
from xllm_npu.state.messages import AWAKE, AddRequest, EngineCommand, EngineProgress, EngineReady, StepOutputs
from xllm_npu.state.output import RequestOutput
from xllm_npu.tracing import request_tracer

if TYPE_CHECKING:
    from xllm_npu.master.beam_request import BeamRequest
    from xllm_npu.master.cluster.cluster import Cluster
    from xllm_npu.master.output_dispatcher import OutputDispatcher
    from xllm_npu.master.request_factory import GenerationInput, PoolingInput, RequestFactory
    from xllm_npu.text.grammar_compiler import GrammarCompiler
    from xllm_npu.text.output_format import OutputFormat
    from xllm_npu.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

API_PREFIX = re.compile(r"\A[a-z]+[-_]")


class EngineStatus(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"  # or on its way there or back
    RESTARTING = "restarting"
    DEAD = "dead"


class EngineDeadError(RuntimeError):
    """An engine process is gone; the message names it and how it ended."""


class ModelSleeping(RuntimeError):
    """The model has given its memory back; it serves requests again after `LLMMaster.wake`."""


class LLMMaster:
    """`status` goes from LOADING to READY, and to DEAD when an engine dies; `failure` then says why.

    With --restart_on_failure an engine that dies after the first READY makes it RESTARTING, then READY again, or what
    it was: a model that slept sleeps, one that was paused is paused. `sleep` makes it SLEEPING and `wake` READY.
    """

    grammars: GrammarCompiler  # once READY, as all of `text`

    def __init__(self, settings: Settings) -> None:
        check_parsers(settings)
        self.settings = settings
        self.status = EngineStatus.LOADING
        self.failure: str | None = None
        self.info: EngineReady | None = None
        self.metrics = Metrics(served_model_names(settings)[0])
        self.default_sampling: dict[str, float] = {}
        self.on_progress: Callable[[EngineProgress], None] = lambda _: None
        self.ledgers: Path | None = None  # directory of what all models of a server share
        self.parent: LLMMaster | None = None  # whose weights this one shares, whenever it starts and that one is awake
        self.text = ModelText()
        self._engines = self._new_engines()
        service = settings.service
        self._restarts = RestartPolicy(service.max_restarts if service.restart_on_failure else 0)
        self._restarting: asyncio.Task[None] | None = None
        self._cluster: Cluster | None = None
        self._placing: asyncio.Task[None] | None = None
        self._timings: dict[int, RequestTiming] = {}
        self._adapter_uses: dict[int, int] = {}  # adapters by open request
        self._factory: RequestFactory
        self._dispatcher: OutputDispatcher | None = None
        self._grammars: GrammarCompiler | None = None
        self._readying: asyncio.Task[None] | None = None
        self._tracer = request_tracer(settings.service.otlp_traces_endpoint)
        self._searches = BeamSearches(self._search_to_text)
        self._residency = ModelResidency(
            lambda: self._engines, settings.kv_cache.enable_vmm_weights, self._searches,
            ResidencyEvents(self._on_residency, self.metrics.on_transition), ServedWeights(settings.model.model))
        self._restoring: asyncio.Task[None] | None = None
        self.adapters = Adapters(settings.lora, lambda message: self._engines.command(message))
        self.figures = EngineFigures(self.metrics, self.adapters)

    async def start(self) -> None:
        """Start the engine processes; `status` tells when all are READY. Other machines are waited for meanwhile."""
        self.text.begin_import()
        if not spans_machines(self.settings):
            await self._launch()
            return
        from xllm_npu.master.cluster.cluster import Cluster

        self._cluster = Cluster(self.settings, lambda reason: self._engines.fail(reason),
                                lambda p: self.on_progress(p))
        self._placing = asyncio.create_task(self._launch_or_fail())

    def _new_engines(self) -> EngineGroup:
        self._directory = new_directory()
        events = EngineEvents(lambda p: self.on_progress(p), self._on_ready, self._on_outputs, self._on_exit)
        return EngineGroup(self.settings, (), self._directory, events)

    async def _launch(self) -> None:
        checkpoint = self.weights.checkpoint if self.weights.version else ""
        if self._cluster is None:
            self._engines.place(plan_on_one_machine(
                self.settings, self._directory, self.ledgers,
                None if self.parent is None else self.parent.weights_directory, checkpoint))
        else:
            self._engines.place(await self._cluster.plan(self._directory, checkpoint))
        await self._engines.start()

    async def _launch_or_fail(self) -> None:
        try:
            await self._launch()
        except Exception as error:
            log.debug("the engines cannot be started", exc_info=True)
            self._engines.fail(" ".join(str(error).split()) or type(error).__name__)

    async def _restart(self, pause: float) -> None:
        """New processes and sockets after the last of the old ones is gone."""
        await self._engines.stop(0)
        await asyncio.sleep(pause)
        self._engines = self._new_engines()
        self.metrics.on_restart()
        await self._launch_or_fail()

    # What service/ calls

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def output_format(self) -> OutputFormat:
        return self.text.output_format

    def generate(self, request: GenerationInput, stream: bool = True) -> AsyncIterator[RequestOutput]:
        """Check and submit at once (raises InvalidParameter, EngineDeadError, ModelSleeping), then iterate outputs.

        The last output has finished=True. `aclose` on the iterator before that aborts the request in the engine.
        Without `stream`, and of a beam search, there is one output, at the end. Raises AdapterGone too.
        """
        self._check_serving()
        message = self._factory.make(request)
        if message.params.use_beam_search:
            return self._search(message)
        return self._submit(message, stream)

    def pool(self, request: PoolingInput) -> AsyncIterator[RequestOutput]:
        """As `generate`, for a model that gives vectors: one output, with the vector."""
        self._check_serving()
        return self._submit(self._factory.make_pooling(request), stream=False)

    def _submit(self, message: AddRequest, stream: bool) -> RequestStream:
        assert self._dispatcher is not None
        outputs = RequestStream(lambda: self._abandon(message.request_id))
        self._dispatcher.open(message, self._sink(message, outputs), stream)
        engine = self._engines.send(message)
        self._timings[message.request_id].engine = engine
        self.figures.on_sent(engine)
        return outputs

    def _check_serving(self) -> None:
        if self._dispatcher is None:
            raise EngineDeadError(self.failure or "The engine is not ready.")
        if self.status is EngineStatus.SLEEPING:
            raise ModelSleeping(f"The model {served_model_names(self.settings)[0]} is asleep.")
        if self.status is not EngineStatus.READY or not self._engines.alive:  # its last words may be yet to come
            raise EngineDeadError(self.failure or "The engine process has ended.")

    def _sink(self, message: AddRequest, outputs: RequestStream) -> Callable[[RequestOutput], None]:
        request_id = message.request_id
        if message.lora_id:
            self.adapters.take(message.lora_id)
            self._adapter_uses[request_id] = message.lora_id
        timing = self._timings[request_id] = RequestTiming(message, self.metrics, self._tracer)

        def sink(output: RequestOutput) -> None:
            timing.on_output(output)
            if output.finished:
                self._timings.pop(request_id, None)
                self._give_adapter(request_id)
            outputs.put(output)

        return sink

    def _give_adapter(self, request_id: int) -> None:
        lora_id = self._adapter_uses.pop(request_id, 0)
        if lora_id:
            self.adapters.give(lora_id)

    def check_health(self) -> bool:
        return self.status in (EngineStatus.READY, EngineStatus.SLEEPING) and self._engines.alive

    # Pauses and sleep: each may be called again and at any time; one goes on at a time. They raise ResidencyError.

    @property
    def weights_directory(self) -> Path | None:
        """Where other engines can have the weights of this one's, if they are awake; a fork's are its parent's."""
        if self.parent is not None:
            return self.parent.weights_directory
        return self._directory if self.status is EngineStatus.READY else None

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the memory of weights and KV cache back; requests are refused until `wake`.

        `level` 1 keeps the weights in host memory, 2 drops them. Requests that are open end ("abort"), finish first
        ("wait"), or stay and go on after the wake-up ("keep").
        """
        await self._residency.sleep(level, mode)

    async def wake(self, tags: Collection[str] = ()) -> None:
        """Take memory again: all of it, or that of `tags` ("weights", "kv_cache"); with all of it the model serves."""
        await self._residency.wake(tags)

    async def pause(self, mode: str = "abort") -> None:
        """Run no steps and keep the memory. New requests wait; `mode` as for `sleep`."""
        await self._residency.pause(mode)

    async def resume(self) -> None:
        """The end of `pause`."""
        await self._residency.resume()

    async def update_weights(self, checkpoint: str, mode: str = "abort", label: str = "") -> int:
        """Replace the weights by those of `checkpoint`, a directory or hub id; `mode` as for `sleep`. Their version."""
        check_can_update(self.settings.model)
        return await self._residency.update_weights(checkpoint, mode, label)

    @property
    def weights(self) -> ServedWeights:
        return self._residency.weights if self.parent is None else self.parent.weights

    def abort(self, external_ids: Collection[str] = ()) -> int:
        """End open requests, those with these ids or all, with what they have so far; how many there were.

        An id may be given with or without what its API has put before it ("chatcmpl-").
        """
        if self._dispatcher is None:
            return 0
        ids = frozenset(external_ids)
        return self._dispatcher.abort(lambda id: not ids or id in ids or API_PREFIX.sub("", id) in ids)

    async def command(self, message: EngineCommand) -> None:
        """Have all engines forget cached prefixes, or trace their steps. Raises CommandFailed, EngineDeadError."""
        if self.info is None:
            raise EngineDeadError(self.failure or "The engine is not ready.")
        try:
            await self._engines.command(message)
        except EnginesGone as error:
            raise EngineDeadError(str(error)) from error

    async def end_held(self) -> None:
        """Requests that no step can reach, as the model is paused or asleep, end with the server."""
        if self.residency.state != AWAKE:
            await self._residency.pause("abort")

    @property
    def residency(self) -> ResidencyState:
        return self._residency.state

    @property
    def stalled(self) -> bool:
        """Requests are open that cannot go on, because others have the memory that they need."""
        return self.figures.stalled

    @property
    def num_waiting(self) -> int:
        """Requests that no step has taken up yet."""
        return self.figures.num_waiting

    @property
    def lacked_memory(self) -> bool:
        """The engines have ended, and might not have with more memory of their devices."""
        return self._engines.lacked_memory

    def virtual_memory_info(self) -> dict[str, Any]:
        """See `MemoryReport.info`; without virtual memory there are no owners."""
        return self.figures.memory_info(self.residency)

    def _on_residency(self) -> None:
        if self.status in (EngineStatus.READY, EngineStatus.SLEEPING):
            self.status = EngineStatus.READY if self._residency.serves else EngineStatus.SLEEPING
        self.metrics.set_residency(self.residency.state, self.residency.level)

    async def _restore(self) -> None:
        try:
            await self._residency.restore()
        except ResidencyError as error:
            log.error("after the restart the model is awake, and not what it was: %s", error)
            self._on_residency()

    async def shutdown(self, patience: float) -> None:
        """End the engines within `patience` seconds, by force if it must be; open requests end with an error."""
        for task in filter(None, (self._placing, self._readying, self._restarting, self._restoring)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._dispatcher is not None:
            self._dispatcher.fail_all("The server is shutting down.")
        if self._grammars is not None:
            await self._grammars.close()
        await self._searches.wait_answered()
        await self._engines.stop(patience)
        if self._cluster is not None:
            await self._cluster.close(f"The server stopped: {self.failure}" if self.failure else "")
        self.text.close()

    def kill(self) -> None:
        """At once; nothing is drained. Other machines notice when this process ends."""
        self._engines.kill()

    # What the engines say

    def _on_ready(self, ready: Sequence[EngineReady]) -> None:
        self._readying = asyncio.create_task(self._become_ready(ready))

    def _on_outputs(self, rank: int, outputs: StepOutputs) -> None:
        for info in outputs.prompts:
            timing = self._timings.get(info.request_id)
            if timing is not None:
                timing.on_prompt(info)
        assert self._dispatcher is not None, "outputs before any request"
        self._dispatcher.handle(outputs)
        if outputs.stats is not None:
            self.figures.on_stats(rank, outputs.stats)

    async def _become_ready(self, engines: Sequence[EngineReady]) -> None:
        ready, group = as_one(engines), self._engines
        try:
            await self.text.load(self.settings, ready)
        except Exception as error:
            log.debug("the tokenizer cannot be loaded", exc_info=True)
            self._on_exit(f"The model's tokenizer cannot be used: {error}")
            return
        try:
            await self.adapters.load_all()
        except EnginesGone:
            return
        except AdapterError as error:
            self._on_exit(str(error))
            return
        if group is not self._engines or not group.alive:
            return  # it died meanwhile, and perhaps another has been started: that one will say when it is ready
        from xllm_npu.master.output_dispatcher import OutputDispatcher
        from xllm_npu.master.request_factory import RequestFactory
        from xllm_npu.text.grammar_compiler import GrammarCompiler

        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer.to_json, ready.vocab_size, ready.eos_token_ids)
        self.grammars = self._grammars
        self._factory = RequestFactory(self.tokenizer, ready, self.settings.model.max_logprobs)
        self._dispatcher = OutputDispatcher(self.tokenizer, self._engines.abort, self._engines.end)
        if self.settings.model.generation_config == "auto":
            self.default_sampling = ready.default_sampling
        self.figures.on_ready(served_model_names(self.settings)[0], engines)
        gc.collect()
        gc.freeze()  # what loading left behind stays for good; full collections need not look at it
        self.info = ready
        if self.status is EngineStatus.RESTARTING:
            log.warning("the engine runs again")
        if self.status in (EngineStatus.LOADING, EngineStatus.RESTARTING):
            self.status, self.failure = EngineStatus.READY, None
            self._residency.ready = True
            if self._residency.slept:
                self.status = EngineStatus.SLEEPING
            self._restoring = asyncio.create_task(self._restore())

    def _on_exit(self, reason: str) -> None:
        pause = None if self.info is None else self._restarts.next_pause(time.monotonic())
        if pause is None:
            self.failure = self.failure or reason
            self.status = EngineStatus.DEAD
        else:
            self.failure = reason
            self.status = EngineStatus.RESTARTING
        self.figures.on_exit()
        self._residency.forget()
        if self._dispatcher is not None:
            self._dispatcher.fail_all(f"The engine stopped: {reason}")
        if pause is not None:
            log.error("the engine stopped and is started again: %s", reason)
            self._restarting = asyncio.create_task(self._restart(pause))

    def _abandon(self, request_id: int) -> None:
        timing = self._timings.pop(request_id, None)
        if self._dispatcher is not None and self._dispatcher.close(request_id) and timing is not None:
            timing.on_end("abort")
        self._give_adapter(request_id)

    # Beam search

    def _search(self, message: AddRequest) -> RequestStream:
        assert self._dispatcher is not None
        outputs = RequestStream(lambda: self._abandon_search(search))
        search = self._searches.start(message, self._dispatcher, self._factory, self._engines.send,
                                      self._sink(message, outputs))
        return outputs

    async def _search_to_text(self, search: BeamRequest) -> RequestOutput:
        """Off the event loop, as its tokens become text all at once."""
        return await self.text.run(search.output, self.tokenizer)

    def _abandon_search(self, search: BeamRequest) -> None:
        self._searches.abandon(search)
        self._give_adapter(search.request_id)
        timing = self._timings.pop(search.request_id, None)
        if timing is not None:
            timing.on_end("abort")
