"""What the console's live page shows: figures that the server has anyway, gathered at most once a second.

Nothing here is for administrators alone: no path, address, prompt or key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from xllm_npu.version import __version__

if TYPE_CHECKING:
    from xllm_npu.master.model_set import ServedModel
    from xllm_npu.metrics import Metrics
    from xllm_npu.service.context import ApiContext

MAX_AGE = 1.0  # seconds
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")


class EngineState(msgspec.Struct):
    """One data-parallel rank. Counters (`*_total`) are since its start."""

    running: int
    waiting: int
    kv_usage: float  # 0 to 1
    steps_total: int
    step_seconds: float  # of the last step
    step_tokens: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    preemptions_total: int
    pages: dict[str, int] | None  # of an elastic KV cache, by state


class Distribution(msgspec.Struct):
    """Seconds."""

    count: int
    sum: float


class ModelState(msgspec.Struct):
    name: str
    names: list[str]
    status: str  # loading, ready, sleeping, restarting, dead
    state: str  # awake, paused, sleeping
    sleep_level: int
    transition: str  # sleep, wake, pause, resume, while one goes on
    requests: int
    architecture: str
    platform: str
    device: str
    dtype: str
    max_model_len: int
    weight_bytes: int
    kv_cache_bytes: int
    num_kv_blocks: int  # of one engine
    block_size: int
    max_seqs: int
    ranks: int
    memory_bytes: dict[str, int]  # virtual memory that is mapped, by owner
    engines: list[EngineState]
    latencies: dict[str, Distribution]
    finished: dict[str, int]  # requests, by reason


class ConsoleState(msgspec.Struct):
    version: str
    time: float  # monotonic seconds of the server
    in_flight: int
    models: list[ModelState]


class StateCache:
    """However many pages ask, the figures are gathered once in `MAX_AGE`."""

    def __init__(self, context: ApiContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._context, self._clock = context, clock
        self._state: ConsoleState | None = None

    def state(self) -> ConsoleState:
        now = self._clock()
        if self._state is None or now - self._state.time >= MAX_AGE:
            self._state = ConsoleState(__version__, now, self._context.admission.in_flight,
                                       [_model_state(model) for model in self._context.models])
        return self._state


def _model_state(model: ServedModel) -> ModelState:
    master, residency, info = model.master, model.master.residency, model.master.info
    metrics = master.metrics
    return ModelState(
        name=model.name, names=list(model.names), status=master.status.value, state=residency.state,
        sleep_level=residency.level, transition=residency.transition, requests=model.in_flight,
        architecture="" if info is None else info.architecture, platform="" if info is None else info.platform,
        device="" if info is None else info.device, dtype="" if info is None else info.dtype,
        max_model_len=0 if info is None else info.max_model_len,
        weight_bytes=0 if info is None else info.weight_bytes,
        kv_cache_bytes=0 if info is None else info.kv_cache_bytes,
        num_kv_blocks=0 if info is None else info.num_kv_blocks, block_size=0 if info is None else info.block_size,
        max_seqs=0 if info is None else info.max_seqs, ranks=0 if info is None else info.ranks,
        memory_bytes=metrics.owned_bytes(), engines=_engine_states(metrics),
        latencies={name: Distribution(*metrics.total(name))
                   for name in HISTOGRAMS},
        finished=metrics.finished())


def _engine_states(metrics: Metrics) -> list[EngineState]:
    states = []
    for figures, pages in metrics.engine_figures():
        def figure(name: str, figures: dict[str, float] = figures) -> int:
            return int(figures.get(name, 0))

        states.append(EngineState(
            running=figure("running"), waiting=figure("waiting"), kv_usage=float(figures.get("kv_usage", 0.0)),
            steps_total=figure("steps_total"), step_seconds=float(figures.get("last_step_seconds", 0.0)),
            step_tokens=figure("last_step_tokens"), prompt_tokens_total=figure("prompt_tokens_total"),
            generation_tokens_total=figure("generation_tokens_total"),
            prefix_queries_total=figure("prefix_queries_total"), prefix_hits_total=figure("prefix_hits_total"),
            preemptions_total=figure("preemptions_total"), pages=pages))
    return states
