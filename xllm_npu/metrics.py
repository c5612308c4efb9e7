"""What the server counts, in Prometheus' text format, under vLLM's names with our prefix `xllm_npu:`; on demand under
vLLM's prefix too, for dashboards that exist.

What an engine counts, and what its requests experience, has the label `engine`, the data-parallel rank from 0.

The master feeds a `Metrics` from the HTTP process's event loop; `/metrics` renders it on the same loop, so there
are no locks. Feeding costs a bisect and a few additions: a histogram takes n equal observations at once. Knows
no request and no engine: callers hand in numbers.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "xllm_npu:"
VLLM_PREFIX = "vllm:"
ENGINE_LABELS = ("model_name", "engine")
PAGE_STATES = ("mapped", "reserved", "free", "pinned")
SLEEP_STATES = ("awake", "paused", "weights_offloaded", "discard_all")
SLEEP_OPERATIONS = {"sleep": "sleep", "wake": "wake_up"}  # transition -> vLLM's name
FINISH_REASONS = ("stop", "length", "abort", "error")

# Bucket bounds: 1, 2, 5 times powers of ten for counts; spacings that resolve an SLO for seconds.
COUNT_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
PARAM_N_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKEN_BOUNDS = tuple(float(2**e) for e in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
               40.0, 80.0, 160.0)
TOKEN_BOUNDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
                20.0, 40.0, 80.0)
REQUEST_BOUNDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
                  240.0, 480.0, 960.0, 1920.0)

TRANSITION_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# name, help, bounds of every histogram; the name is the attribute of `Metrics` too.
HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("request_prompt_tokens", "Prompt tokens of a finished request.", COUNT_BOUNDS),
    ("request_generation_tokens", "Generated tokens of a finished request.", COUNT_BOUNDS),
    ("request_params_n", "The parameter n of a finished request.", PARAM_N_BOUNDS),
    ("request_params_max_tokens", "The parameter max_tokens of a finished request.", COUNT_BOUNDS),
    ("iteration_tokens_total", "Tokens processed in one engine step.", STEP_TOKEN_BOUNDS),
    ("time_to_first_token_seconds", "Arrival to first token.", TTFT_BOUNDS),
    ("inter_token_latency_seconds", "Time between a sequence's tokens.", TOKEN_BOUNDS),
    ("request_time_per_output_token_seconds", "A finished request's mean time for each token after the first.",
     TOKEN_BOUNDS),
    ("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BOUNDS),
    ("request_queue_time_seconds", "Arrival to first scheduling.", REQUEST_BOUNDS),
    ("request_prefill_time_seconds", "First scheduling to first token.", REQUEST_BOUNDS),
    ("request_decode_time_seconds", "First token to last token.", REQUEST_BOUNDS),
    ("request_inference_time_seconds", "First scheduling to last token.", REQUEST_BOUNDS),
)

# name, help, the engine statistic it shows.
ENGINE_GAUGES = (
    ("num_requests_running", "Sequences in the running batch.", "running"),
    ("num_requests_waiting", "Requests waiting to be scheduled.", "waiting"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
)
ENGINE_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries_total"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits_total"),
    ("prompt_tokens_cached", "Prompt tokens that were not computed, as they are prefix_cache_hits.",
     "prefix_hits_total"),
    ("num_preemptions", "Sequences preempted.", "preemptions_total"),
    ("prompt_tokens", "Prompt tokens processed.", "prompt_tokens_total"),
    ("generation_tokens", "Tokens generated.", "generation_tokens_total"),
    ("engine_steps", "Engine steps run.", "steps_total"),
    ("graph_misses", "Decode batches larger than the largest captured graph.", "graph_misses_total"),
    ("prefill_graph_misses", "Steps with prompts larger than the largest captured number of tokens.",
     "prefill_graph_misses_total"),
)
# name, help, label, and by its values the engine statistic they show. What vLLM tells apart and we have one of is one.
ENGINE_BREAKDOWNS = (
    ("num_requests_waiting_by_reason", "Requests waiting to be scheduled, by reason.", GaugeMetricFamily, "reason",
     {"capacity": "waiting"}),
    ("prompt_tokens_by_source", "Prompt tokens by where their KV comes from.", CounterMetricFamily, "source",
     {"local_compute": "prompt_tokens_total", "local_cache_hit": "prefix_hits_total"}),
)  # fmt: skip


class Histogram:
    """Bucket counts over fixed bounds; an observation on a bound belongs to that bound's bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += n
        self._sum += value * n

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts)))

    @property
    def sum(self) -> float:
        return self._sum


class RequestFigures:
    """What the requests of one engine experience."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, _, bounds in HISTOGRAMS}
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        # Bound once: these are called for every step of every request.
        self._observe_interval = self.histograms["inter_token_latency_seconds"].observe
        self.observe_step = self.histograms["iteration_tokens_total"].observe

    def on_queued(self, queue_seconds: float, prefill_seconds: float) -> None:
        """A request's waiting and prefill, known when its first token is."""
        self.histograms["request_queue_time_seconds"].observe(queue_seconds)
        self.histograms["request_prefill_time_seconds"].observe(prefill_seconds)

    def on_first_token(self, seconds: float) -> None:
        self.histograms["time_to_first_token_seconds"].observe(seconds)

    def on_tokens(self, n: int, interval: float) -> None:
        """A sequence got n tokens, `interval` seconds after its previous ones."""
        self._observe_interval(interval / n, n)

    def on_finished(self, reason: str, *, prompt_tokens: int, generation_tokens: int, n: int,
                    max_tokens: int | None, e2e_seconds: float, first_token_seconds: float | None = None,
                    queue_seconds: float | None = None) -> None:
        """A request ended. Times count from its arrival; `first_token_seconds` is None if there was none."""
        histograms = self.histograms
        self.finished[reason] = self.finished.get(reason, 0) + 1
        histograms["request_prompt_tokens"].observe(prompt_tokens)
        histograms["request_generation_tokens"].observe(generation_tokens)
        histograms["request_params_n"].observe(n)
        if max_tokens is not None:
            histograms["request_params_max_tokens"].observe(max_tokens)
        histograms["e2e_request_latency_seconds"].observe(e2e_seconds)
        if first_token_seconds is not None:
            decode_seconds = e2e_seconds - first_token_seconds
            histograms["request_decode_time_seconds"].observe(decode_seconds)
            if generation_tokens > n:
                per_token = decode_seconds * n / (generation_tokens - n)
                histograms["request_time_per_output_token_seconds"].observe(per_token)
        if queue_seconds is not None:
            histograms["request_inference_time_seconds"].observe(e2e_seconds - queue_seconds)


class Metrics:
    """One server's metrics. `set_model` once the engine is ready; the other methods as things happen."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self._cache_configs: list[dict[str, str]] = [{}]  # by engine
        self._engines: list[Mapping[str, float]] = [{}]
        self._pages: list[Mapping[str, Any] | None] = [None]
        self._owned: list[Mapping[str, int]] = [{}]
        self._requests = [RequestFigures()]  # by engine
        self._loras: dict[int, tuple[int, str, str, float]] = {}  # by engine
        self._rejections: dict[str, int] = {}
        self._restarts = 0
        self._sleep_state = dict.fromkeys(SLEEP_STATES, 0) | {"awake": 1}
        self._transitions: dict[str, Histogram] = {}
        self._failed_transitions: dict[tuple[str, str], int] = {}

    def set_model(self, model_name: str, cache_configs: Sequence[Mapping[str, object]] = ({},)) -> None:
        """One of `cache_configs` for each engine; they become the labels of cache_config_info: block_size, ..."""
        self.model_name = model_name
        self._cache_configs = [{key: str(value) for key, value in config.items()} for config in cache_configs]
        self._engines = [{} for _ in cache_configs]
        self._pages = [None for _ in cache_configs]
        self._owned = [{} for _ in cache_configs]
        while len(self._requests) < len(cache_configs):  # those of engines that are started again count on
            self._requests.append(RequestFigures())

    def set_engine(
        self, engine: int, pages: Mapping[str, Any] | None = None, owned_pages: Mapping[str, int] | None = None,
        **stats: float
    ) -> None:
        """An engine's latest statistics, by the field names of EngineStats. Once a step, after the step.

        `pages`: of an elastic KV cache, by the field names of PageStats. `owned_pages`: bytes mapped, by owner.
        """
        self._pages[engine], self._owned[engine] = pages, owned_pages or {}
        before = self._engines[engine]
        if stats.get("steps_total", -1) != before.get("steps_total") and stats.get("last_step_tokens"):
            self._requests[engine].observe_step(stats["last_step_tokens"])
        self._engines[engine] = stats

    def set_loras(self, engine: int, max_loras: int, running: Sequence[str], waiting: Sequence[str]) -> None:
        """Adapters of requests that run and wait, where requests may have any."""
        self._loras[engine] = max_loras, ",".join(sorted(running)), ",".join(sorted(waiting)), time.time()

    def of_engine(self, engine: int) -> RequestFigures:
        """What its requests experience is told to this."""
        return self._requests[engine]

    def on_restart(self) -> None:
        """The engines are started again: what they counted begins anew."""
        self._restarts += 1
        self._loras.clear()
        self._engines = [{} for _ in self._engines]
        self._pages = [None for _ in self._engines]
        self._owned = [{} for _ in self._engines]

    def set_residency(self, state: str, level: int) -> None:
        """`state`: awake, paused or sleeping; `level` of sleep."""
        self._sleep_state = {
            "awake": int(state == "awake"), "paused": int(state == "paused"),
            "weights_offloaded": int(state == "sleeping" and level == 1),
            "discard_all": int(state == "sleeping" and level == 2),
        }

    def on_transition(self, name: str, seconds: float, error: str) -> None:
        """A sleep, wake, pause, resume or update of weights is over; `error` is one word, or empty if it came about."""
        if error:
            self._failed_transitions[name, error] = self._failed_transitions.get((name, error), 0) + 1
        else:
            self._transitions.setdefault(name, Histogram(TRANSITION_BOUNDS)).observe(seconds)

    def on_rejected(self, reason: str) -> None:
        """A request was turned away at the door."""
        self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def engine_figures(self) -> list[tuple[dict[str, float], dict[str, int] | None]]:
        """Each engine's latest statistics, and of an elastic KV cache the pages by state."""
        return [(dict(stats), None if pages is None else {state: pages[state] for state in PAGE_STATES})
                for stats, pages in zip(self._engines, self._pages)]

    def owned_bytes(self) -> dict[str, int]:
        """Virtual memory that is mapped, by owner, over all engines."""
        total: dict[str, int] = {}
        for owned in self._owned:
            for owner, count in owned.items():
                total[owner] = total.get(owner, 0) + count
        return total

    def finished(self) -> dict[str, int]:
        """Requests that ended, by reason, over all engines."""
        reasons = dict.fromkeys(reason for figures in self._requests for reason in figures.finished)
        return {reason: sum(figures.finished.get(reason, 0) for figures in self._requests) for reason in reasons}

    def total(self, name: str) -> tuple[int, float]:
        """Count and sum of a histogram over all engines."""
        histograms = [figures.histograms[name] for figures in self._requests]
        return sum(one.count for one in histograms), sum(one.sum for one in histograms)

    def render(self) -> bytes:
        return render([self])

    def families(self) -> Iterator[Metric]:
        labels, values = ["model_name"], [self.model_name]
        for name, text, key in ENGINE_GAUGES:
            yield self._by_engine(GaugeMetricFamily, name, text, key)
        for name, text, key in ENGINE_COUNTERS:
            yield self._by_engine(CounterMetricFamily, name, text, key)
        if any(pages is not None for pages in self._pages):
            yield from self._page_families()
        yield from self._breakdowns()
        yield from self._lora_families()
        success = CounterMetricFamily(PREFIX + "request_success", "Requests finished, by reason.",
                                      labels=(*ENGINE_LABELS, "finished_reason"))
        for engine, figures in enumerate(self._requests):
            for reason, count in figures.finished.items():
                success.add_metric([self.model_name, str(engine), reason], count)
        yield success
        yield self._by_label("admission_rejections", "Requests turned away, by reason.", "reason",
                             self._rejections)
        restarts = CounterMetricFamily(PREFIX + "engine_restarts", "Times that failed engines were started again.",
                                       labels=labels)
        restarts.add_metric(values, self._restarts)
        yield restarts
        yield from self._residency_families()
        if any(self._owned):
            owned = GaugeMetricFamily(PREFIX + "virtual_memory_bytes", "Bytes of virtual memory mapped, by owner.",
                                      labels=(*ENGINE_LABELS, "owner"))
            for engine, bytes_by_owner in enumerate(self._owned):
                for owner, count in bytes_by_owner.items():
                    owned.add_metric([self.model_name, str(engine), owner], count)
            yield owned
        for name, text, _ in HISTOGRAMS:
            family = HistogramMetricFamily(PREFIX + name, text, labels=ENGINE_LABELS)
            for engine, figures in enumerate(self._requests):
                histogram = figures.histograms[name]
                family.add_metric([self.model_name, str(engine)], histogram.buckets(), histogram.sum)
            yield family
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache's configuration.",
                                 labels=[*ENGINE_LABELS, *self._cache_configs[0]])
        for engine, config in enumerate(self._cache_configs):
            info.add_metric([self.model_name, str(engine), *config.values()], 1)
        yield info

    def _lora_families(self) -> Iterator[Metric]:
        """As vLLM has it: the adapters are labels, and the value is the time at which that was so."""
        if not self._loras:
            return
        family = GaugeMetricFamily(
            f"{PREFIX}lora_requests_info", "Adapters of running and waiting requests; the value is a time.",
            labels=(*ENGINE_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"))
        for engine, (most, running, waiting, at) in self._loras.items():
            family.add_metric((self.model_name, str(engine), str(most), running, waiting), at)
        yield family

    def _breakdowns(self) -> Iterator[Metric]:
        for name, text, kind, label, keys in ENGINE_BREAKDOWNS:
            family = kind(PREFIX + name, text, labels=(*ENGINE_LABELS, label))
            for engine, stats in enumerate(self._engines):
                for value, key in keys.items():
                    family.add_metric([self.model_name, str(engine), value], stats.get(key, 0))
            yield family

    def _page_families(self) -> Iterator[Metric]:
        """Of elastic KV caches only."""
        labels = (*ENGINE_LABELS, "state")
        gauge = GaugeMetricFamily(PREFIX + "kv_cache_pages", "Virtual pages of the KV cache, by state.", labels=labels)
        refused = CounterMetricFamily(PREFIX + "kv_cache_growth_refusals",
                                      "Times the KV cache could not grow, by reason.",
                                      labels=(*ENGINE_LABELS, "reason"))
        for engine, pages in enumerate(self._pages):
            names = [self.model_name, str(engine)]
            if pages is None:
                continue
            for state in PAGE_STATES:
                gauge.add_metric([*names, state], pages[state])
            for reason, count in pages["refusals"].items():
                refused.add_metric([*names, reason], count)
        yield gauge
        yield refused

    def _residency_families(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            PREFIX + "engine_sleep_state", "1 at what holds; weights_offloaded: sleep level 1, discard_all: level 2.",
            labels=["model_name", "sleep_state"])
        for name, holds in self._sleep_state.items():
            state.add_metric([self.model_name, name], holds)
        yield state
        family = HistogramMetricFamily(PREFIX + "residency_transition_seconds",
                                       "Time of a sleep, wake, pause, resume or update of weights.",
                                       labels=["model_name", "transition"])
        for name, histogram in self._transitions.items():
            family.add_metric([self.model_name, name], histogram.buckets(), histogram.sum)
        yield family
        slept = HistogramMetricFamily(PREFIX + "sleep_mode_operation_duration_seconds", "Time of a sleep or wake-up.",
                                      labels=["model_name", "operation"])
        for name, operation in SLEEP_OPERATIONS.items():
            if name in self._transitions:
                histogram = self._transitions[name]
                slept.add_metric([self.model_name, operation], histogram.buckets(), histogram.sum)
        yield slept
        failed = CounterMetricFamily(PREFIX + "residency_transition_failures", "Transitions that did not come about.",
                                     labels=["model_name", "transition", "reason"])
        for (name, reason), count in self._failed_transitions.items():
            failed.add_metric([self.model_name, name, reason], count)
        yield failed

    def _by_engine(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, key: str
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=ENGINE_LABELS)
        for engine, stats in enumerate(self._engines):
            family.add_metric([self.model_name, str(engine)], stats.get(key, 0))
        return family

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, count in counts.items():
            family.add_metric([self.model_name, key], count)
        return family


def render(all_metrics: Sequence[Metrics], vllm_names: bool = False) -> bytes:
    """Several models' metrics as one text: each family once, with every model's samples; `vllm_names`: and once more
    under vLLM's prefix.
    """
    registry = CollectorRegistry()
    registry.register(_View(all_metrics, vllm_names))
    return generate_latest(registry)


class _View(Collector):
    """The registry's way in."""

    def __init__(self, all_metrics: Sequence[Metrics], vllm_names: bool) -> None:
        self._all_metrics, self._vllm_names = all_metrics, vllm_names

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for family in (family for metrics in self._all_metrics for family in metrics.families()):
            first = merged.setdefault(family.name, family)
            if first is not family:
                first.samples.extend(family.samples)
        yield from merged.values()
        if self._vllm_names:
            yield from map(_renamed, merged.values())


def _renamed(family: Metric) -> Metric:
    same = Metric(VLLM_PREFIX + family.name.removeprefix(PREFIX), family.documentation, family.type)
    same.samples = [sample._replace(name=VLLM_PREFIX + sample.name.removeprefix(PREFIX)) for sample in family.samples]
    return same
