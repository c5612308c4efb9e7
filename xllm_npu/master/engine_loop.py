"""The engine's heartbeat: schedule, execute, process; plain or overlapped.

One object that the engine process drives for clients and that `LLM` drives in the caller's process. With
`enable_schedule_overlap` one step runs while the next is scheduled; the plain loop gives the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xllm_models.weights.lora_adapter import LoraError

from xllm_npu.config.settings import Settings
from xllm_npu.execution.engine import Engine
from xllm_npu.execution.engine_start import start_engine
from xllm_npu.execution.grammar_cache import PreparedRequests
from xllm_npu.execution.plugins import load_plugins
from xllm_npu.execution.step_profile import ProfileError
from xllm_npu.master.engine_residency import EngineResidency
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.policy import get_policy
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.kv_cache.elastic_block_pool import ElasticBlockPool
from xllm_npu.state.kv_cache.page_allocator import PageAllocator
from xllm_npu.state.launch import EngineInit
from xllm_npu.state.messages import (
    AbortRequest,
    AddRequest,
    CommandDone,
    EngineCommand,
    EngineProgress,
    EngineReady,
    LoadLora,
    OwnedPages,
    ResetPrefixCache,
    Residency,
    ResidencyMessage,
    StepOutputs,
    StepTogether,
    UnloadLora,
)

if TYPE_CHECKING:
    from xllm_npu.text.grammar_matcher import MatcherFactory

log = logging.getLogger(__name__)

PREPARING_PAUSE = 0.02  # seconds at most until messages are looked at again, where all requests wait for grammars
STALL_PAUSE = 0.02  # seconds until memory is asked for again, where no request can go on without it


def scheduler_options(settings: Settings, ready: EngineReady) -> SchedulerOptions:
    """What the scheduler must know, from what was set and what the engine found."""
    s, kv, profile = settings.scheduler, settings.kv_cache, settings.profile
    shares_prefixes = kv.enable_prefix_cache and not (ready.pooling is not None and ready.pooling.all_positions)
    return SchedulerOptions(
        max_seqs=ready.max_seqs, max_tokens=ready.max_tokens_per_batch, max_model_len=ready.max_model_len,
        num_blocks=ready.num_kv_blocks + 1, block_size=ready.block_size, eos_token_ids=tuple(ready.eos_token_ids),
        rotary_switch=ready.rotary_switch, pooling=ready.pooling is not None,
        policy=s.scheduling_policy, priority_strategy=s.priority_strategy,
        enable_chunked_prefill=s.enable_chunked_prefill and ready.chunked_prefill,
        max_chunk=max(s.max_tokens_per_chunk_for_prefill, 0),
        enable_prefix_cache=shares_prefixes,
        enable_in_batch_prefix_cache=kv.enable_in_batch_prefix_cache,
        max_loras=settings.lora.max_loras if settings.lora.enable_lora else 0,
        prefix_seed=kv.xxh3_128bits_seed, prefill_gate=s.prefill_scheduling_memory_usage_threshold,
        enable_online_preempt_offline=s.enable_online_preempt_offline,
        enable_starve_prevent=s.enable_starve_prevent, starve_seconds=s.starve_threshold,
        latency_aware=profile.enable_latency_aware_schedule,
        max_ttft_seconds=profile.max_global_ttft_ms / 1e3, max_tpot_seconds=profile.max_global_tpot_ms / 1e3,
    )


def _grammar_compiler(directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> MatcherFactory:
    """On a thread, with the first request that has a grammar."""
    from xllm_npu.text.grammar_matcher import MatcherFactory
    from xllm_npu.text.tokenizer import Tokenizer

    return MatcherFactory(Tokenizer(directory).to_json(), vocab_size, eos_token_ids)


def _elastic_pool(engine: Engine) -> ElasticBlockPool | None:
    if engine.pages is None:
        return None
    return ElasticBlockPool(PageAllocator(engine.pages.layout, engine.pages))


class EngineLoop:
    def __init__(self, scheduler: Scheduler, engine: Engine, ready: EngineReady, *, overlap: bool) -> None:
        self.scheduler = scheduler
        self.ready = ready
        self._engine = engine
        self._depth = 1 if overlap else 0  # steps that may run while the next is scheduled
        self._preparing = None if engine.grammars is None else PreparedRequests(engine.grammars)
        self.residency = EngineResidency(scheduler, engine)
        ready.owned_pages = scheduler.stats.owned_pages = self._owned_pages()

    @classmethod
    def create(
        cls, settings: Settings, progress: Callable[[EngineProgress], None] | None = None,
        init: EngineInit | None = None,
    ) -> EngineLoop:
        """Load the model and be ready to step. Raises what the loading raises. No `init`: not part of a server."""
        load_plugins()
        get_policy(settings.scheduler.scheduling_policy)  # refused now, not after minutes of loading
        overlap = settings.scheduler.enable_schedule_overlap
        engine, ready = start_engine(settings, init, progress or (lambda _: None), overlap=overlap,
                                     grammars=_grammar_compiler)
        scheduler = Scheduler(scheduler_options(settings, ready), _elastic_pool(engine))
        if ready.steps_together:
            from xllm_npu.master.coupled_loop import CoupledLoop  # which builds on this module
            from xllm_npu.master.step_exchange import connect

            assert init is not None, "data-parallel ranks are started by a server"
            exchange = connect(init.agreement, init.dp_rank, settings.parallel.dp_size,
                               settings.distributed.collective_timeout, engine.check)
            return CoupledLoop(scheduler, engine, ready, overlap=overlap, rank=init.dp_rank, exchange=exchange)
        return cls(scheduler, engine, ready, overlap=overlap)

    @property
    def tokenizer_dir(self) -> Path:
        return Path(self.ready.tokenizer_dir)

    def submit(self, message: AddRequest | AbortRequest | StepTogether | ResidencyMessage) -> None:
        """Take a message in. A request that breaks the scheduler's rules ends alone, with an error.

        Whether a ResidencyMessage has come about, `residency` tells.
        """
        if isinstance(message, ResidencyMessage):
            self.residency.ask(message)
            return
        if isinstance(message, StepTogether):
            return  # this engine steps on its own
        if isinstance(message, AbortRequest):
            self.scheduler.abort(message.keys)
            return
        try:
            self._add(message)
        except Exception:  # one malformed request must not end the others; it is told so
            log.exception("request %s cannot be scheduled", message.external_id)
            self.scheduler.refuse(message, "The request is malformed.")

    def _add(self, message: AddRequest) -> None:
        grammar = message.params.grammar
        if grammar is None:
            self.scheduler.add(message)
        elif self._preparing is None:
            self.scheduler.refuse(message, "This engine has no grammars.")
        else:
            self.scheduler.add(message, prepared=self._preparing.add(message.request_id, grammar))

    def _take_prepared(self, timeout: float = 0.0) -> None:
        """Let requests run whose grammars are there by now, or are after `timeout` seconds."""
        if self._preparing:
            for request_id, failure in self._preparing.take_done(timeout):
                self.scheduler.set_prepared(request_id, failure)

    def command(self, message: EngineCommand) -> CommandDone:
        """Do it at once; an answer in any case."""
        if isinstance(message, ResetPrefixCache):
            self.scheduler.reset_prefix_cache()
            return CommandDone()
        if isinstance(message, LoadLora | UnloadLora):
            return self._change_lora(message)
        try:
            self._engine.profile(message.directory)
        except ProfileError as error:
            return CommandDone(str(error))
        return CommandDone()

    def _change_lora(self, message: LoadLora | UnloadLora) -> CommandDone:
        lora_id = message.lora_id
        if isinstance(message, LoadLora):
            try:
                self._engine.load_lora(lora_id, message.path)
            except LoraError as error:
                return CommandDone(str(error))
            self.scheduler.add_lora(lora_id)
        elif self.scheduler.uses_lora(lora_id):
            return CommandDone("Requests that use the adapter are open.")
        else:
            self.scheduler.forget_lora(lora_id)
            self._engine.unload_lora(lora_id)
        return CommandDone()

    def check(self) -> None:
        """Raise how a worker died, if one has, or what became of its memory."""
        self._engine.check()
        self.scheduler.running.blocks.pool.check()

    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepOutputs | None:
        """One turn: schedule the next step if there is one, process the oldest if the pipeline is full.

        Returns news (perhaps empty), or None if there was nothing to do. Raises what a worker raised.
        """
        self._take_prepared()
        group = self.scheduler.schedule()
        if group is not None:
            self._engine.submit(group)
        in_flight = self.scheduler.num_in_flight
        if in_flight > self._depth or (group is None and in_flight):
            return self.scheduler.process(self._engine.collect())
        if group is None:
            if self.scheduler.stalled:
                time.sleep(STALL_PAUSE)
            self._take_prepared(PREPARING_PAUSE)
            return self.scheduler.pending_outputs()
        return StepOutputs()

    def update_gauges(self) -> None:
        """What the scheduler's `stats` say of this moment."""
        self.scheduler.update_gauges()
        self.update_owned_pages()

    def update_owned_pages(self) -> None:
        self.scheduler.stats.owned_pages = self._owned_pages()

    def _owned_pages(self) -> list[OwnedPages]:
        return [] if self._engine.memory is None else self._engine.memory.owned_pages()

    def change(self, message: ResidencyMessage) -> Residency:
        """Step until it has come about; for a caller who has no requests open."""
        self.residency.ask(message)
        while (answer := self.residency.advance()) is None:
            self.step()
        return answer

    def close(self) -> None:
        """Wait for the steps in flight and end the workers."""
        self.scheduler.abort_all()
        while self.scheduler.num_in_flight:
            self.scheduler.process(self._engine.collect())
        self.scheduler.close()
        self._engine.close()
