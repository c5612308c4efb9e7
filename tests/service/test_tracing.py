"""Spans of requests: whose child they are, what they say, and that nothing is imported where they are off."""

import http.server
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import says
from xllm_npu import tracing
from xllm_npu.master.request_timing import RequestTiming
from xllm_npu.metrics import Metrics
from xllm_npu.state.messages import AddRequest, PromptInfo
from xllm_npu.state.output import RequestOutput, SequenceDelta
from xllm_npu.state.sampling_params import SamplingParams

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exported():
    exporter = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    return exporter, tracing.tracer_of(exporter, batch=False)


def request(**params: object) -> AddRequest:
    return AddRequest(request_id=1, external_id="chatcmpl-x", prompt=np.arange(5, dtype=np.int32).tobytes(),
                      params=SamplingParams(**params), arrival_time=0.0)


def run(tracer: tracing.RequestTracer, error: str | None = None, **params: object) -> None:
    timing = RequestTiming(request(**params), Metrics("m"), tracer)
    timing.on_prompt(PromptInfo(1, 0, 0.0, 0.0))
    timing.on_output(RequestOutput(1, [SequenceDelta(0, "a", [1], None, None if error else "length")], 5,
                                   num_generated_tokens=3, finished=True, error=error))


def test_a_span_and_its_parent(exported):
    exporter, tracer = exported
    token = tracing.INCOMING.set({"traceparent": PARENT, "tracestate": "a=b"})
    try:
        run(tracer, n=2, temperature=0.5, max_tokens=7)
    finally:
        tracing.INCOMING.reset(token)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind.name) == ("llm_request", "SERVER")
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    told = dict(span.attributes)
    for name, value in {
        "gen_ai.request.id": "chatcmpl-x", "gen_ai.request.n": 2, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 7, "gen_ai.response.model": "m", "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 3, "gen_ai.usage.num_sequences": 2,
        "gen_ai.latency.time_in_queue": 0.0,
    }.items():
        assert told[name] == value, name
    inference = told["gen_ai.latency.time_in_model_prefill"] + told["gen_ai.latency.time_in_model_decode"]
    assert inference == pytest.approx(told["gen_ai.latency.time_in_model_inference"])
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(told["gen_ai.latency.e2e"], abs=1e-6)


def test_without_a_parent_and_without_a_token(exported):
    exporter, tracer = exported
    RequestTiming(request(), Metrics("m"), tracer).on_end("abort")
    run(tracer, error="The engine stopped.")
    aborted, failed = exporter.get_finished_spans()
    assert aborted.parent is None
    assert "gen_ai.latency.time_to_first_token" not in aborted.attributes
    assert "gen_ai.request.max_tokens" not in aborted.attributes
    assert aborted.status.is_ok or aborted.status.is_unset
    assert not failed.status.is_ok


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_malformed_parent_is_none(exported, header):
    exporter, tracer = exported
    token = tracing.INCOMING.set({"traceparent": header})
    run(tracer)
    tracing.INCOMING.reset(token)
    assert exporter.get_finished_spans()[0].parent is None


async def test_the_headers_of_a_request_reach_its_generation(master):
    seen = []
    plain = says("a")

    async def script(one):
        seen.append(dict(tracing.INCOMING.get()))
        async for output in plain(one):
            yield output

    master.script = script
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    async with client_of(master, otlp_traces_endpoint="http://127.0.0.1:1") as client:
        for headers in ({"traceparent": PARENT, "tracestate": "a=b"}, {}, {"tracestate": "x" * 5000}):
            await client.post("/v1/chat/completions", json=body, headers=headers)
    assert seen == [{"traceparent": PARENT, "tracestate": "a=b"}, {}, {}]


def test_where_traces_go():
    assert tracing.trace_url("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert tracing.trace_url("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    assert tracing.trace_url("https://collector/otlp/v1/traces") == "https://collector/otlp/v1/traces"
    for wrong in ("localhost:4317", "grpc://localhost", "http://"):
        with pytest.raises(tracing.TracingUnavailable, match="http"):
            tracing.trace_url(wrong)
    assert tracing.request_tracer("") is None


def test_spans_are_sent():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = tracing.trace_url(f"http://127.0.0.1:{server.server_port}")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        run(tracing.tracer_of(OTLPSpanExporter(endpoint=url), batch=False))
        server.shutdown()
    ((path, sent),) = got
    assert path == "/v1/traces"
    assert b"llm_request" in sent
    assert b"chatcmpl-x" in sent


def test_nothing_is_imported_where_they_are_off():
    """FastAPI itself may import the API package."""
    code = ("import sys; import xllm_npu.master.llm_master, xllm_npu.service.app; from xllm_npu import tracing; "
            "tracing.request_tracer(''); "
            "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
