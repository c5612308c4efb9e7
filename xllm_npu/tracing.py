"""OpenTelemetry: one span for each request, with the attributes that vLLM gives its own.

Attribute names: OpenTelemetry's semantic conventions for generative AI, and vLLM's `gen_ai.latency.*` (seconds) where
these have none. A span is made when its request has ended; its parent is what the client's W3C `traceparent` header
says. The libraries (the extra `otel`) are imported only where an endpoint is set. Knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

SERVICE_NAME = "xllm-npu"
SPAN_NAME = "llm_request"
TRACE_HEADERS = ("traceparent", "tracestate")
# Of the HTTP request that is served here. Never changed in place.
INCOMING: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default={})  # noqa: B039


class TracingUnavailable(RuntimeError):
    """There is no way to send traces; the message says what to install or to change."""


@dataclass(slots=True, kw_only=True)
class RequestSpan:
    """What there is to tell of a request that has ended. Seconds count from its arrival."""

    headers: Mapping[str, str]  # of TRACE_HEADERS, those that came with it
    arrival_time: float  # time.time()
    e2e_seconds: float
    request_id: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    n: int
    num_sequences: int
    temperature: float
    top_p: float
    max_tokens: int | None
    queue_seconds: float | None
    first_token_seconds: float | None


class RequestTracer:
    """Hands spans to a thread that sends them in batches; what cannot be sent is dropped."""

    def __init__(self, tracer: Any, extract: Callable[[Mapping[str, str]], Any], kind: Any, failed: Any) -> None:
        self._tracer, self._extract, self._kind, self._failed = tracer, extract, kind, failed

    def record(self, span: RequestSpan) -> None:
        began = int(span.arrival_time * 1e9)
        made = self._tracer.start_span(SPAN_NAME, context=self._extract(span.headers), kind=self._kind,
                                       start_time=began, attributes=attributes(span))
        if span.finish_reason == "error":
            made.set_status(self._failed)
        made.end(end_time=began + int(span.e2e_seconds * 1e9))


def attributes(span: RequestSpan) -> dict[str, Any]:
    """Of the span, without those that are not known."""
    queued, first = span.queue_seconds, span.first_token_seconds
    known = {
        "gen_ai.request.id": span.request_id,
        "gen_ai.request.n": span.n,
        "gen_ai.request.temperature": span.temperature,
        "gen_ai.request.top_p": span.top_p,
        "gen_ai.request.max_tokens": span.max_tokens,
        "gen_ai.response.model": span.model,
        "gen_ai.response.finish_reasons": [span.finish_reason],
        "gen_ai.usage.prompt_tokens": span.prompt_tokens,
        "gen_ai.usage.completion_tokens": span.completion_tokens,
        "gen_ai.usage.num_sequences": span.num_sequences,
        "gen_ai.latency.e2e": span.e2e_seconds,
        "gen_ai.latency.time_in_queue": queued,
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.time_in_model_prefill": None if first is None or queued is None else first - queued,
        "gen_ai.latency.time_in_model_decode": None if first is None else span.e2e_seconds - first,
        "gen_ai.latency.time_in_model_inference": None if queued is None else span.e2e_seconds - queued,
    }
    return {name: value for name, value in known.items() if value is not None}


@cache
def request_tracer(endpoint: str) -> RequestTracer | None:
    """None without an endpoint; one for all models of a server. Raises TracingUnavailable."""
    if not endpoint:
        return None
    url = trace_url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailable("--otlp_traces_endpoint needs the packages of the extra otel: "
                                 "pip install 'xllm-npu[otel]'.") from error
    return tracer_of(OTLPSpanExporter(endpoint=url))


def trace_url(endpoint: str) -> str:
    """Where OTLP over HTTP takes traces; a collector's bare address gets the usual path. Raises TracingUnavailable."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TracingUnavailable("--otlp_traces_endpoint must be an http or https URL, such as http://localhost:4318.")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def tracer_of(exporter: Any, batch: bool = True) -> RequestTracer:
    """A tracer whose spans go to `exporter`; not in batches: at once."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}))
    provider.add_span_processor(BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter))
    return RequestTracer(provider.get_tracer(SERVICE_NAME), TraceContextTextMapPropagator().extract, SpanKind.SERVER,
                         Status(StatusCode.ERROR))
