"""When a request's tokens came, for the metrics and, where there is a tracer, for its span."""

from __future__ import annotations

import time

from xllm_npu import tracing
from xllm_npu.metrics import Metrics
from xllm_npu.state.messages import AddRequest, PromptInfo
from xllm_npu.state.output import RequestOutput
from xllm_npu.tracing import RequestSpan, RequestTracer


class RequestTiming:
    """One open request's clock. Told of every output of the request, it feeds `Metrics` and the tracer."""

    __slots__ = ("_began", "_first", "_headers", "_last", "_metrics", "_queue_seconds", "_request", "_tokens",
                 "_tracer", "engine")

    def __init__(self, request: AddRequest, metrics: Metrics, tracer: RequestTracer | None = None) -> None:
        self._request, self._metrics, self._tracer = request, metrics, tracer
        self._headers = tracing.INCOMING.get()
        self.engine = 0  # that has it
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began
        self._tokens = 0
        self._queue_seconds: float | None = None

    def on_prompt(self, info: PromptInfo) -> None:
        self._queue_seconds = info.queue_seconds
        figures = self._metrics.of_engine(self.engine)
        figures.on_queued(info.queue_seconds, info.prefill_seconds)
        self._first = self._last = time.monotonic()
        figures.on_first_token(self._first - self._began)

    def on_output(self, output: RequestOutput) -> None:
        new = output.num_generated_tokens - self._tokens
        if new > 0:
            now = time.monotonic()
            if self._tokens:
                self._metrics.of_engine(self.engine).on_tokens(new, max(now - self._last, 1e-9))
            self._tokens, self._last = output.num_generated_tokens, now
        if output.finished:
            reasons = [d.finish_reason for d in output.deltas if d.finish_reason]
            self.on_end("error" if output.error else reasons[-1] if reasons else "stop")

    def on_end(self, reason: str) -> None:
        params = self._request.params
        first = None if self._first is None else self._first - self._began
        prompt_tokens, e2e_seconds = len(self._request.prompt) // 4, time.monotonic() - self._began
        self._metrics.of_engine(self.engine).on_finished(
            reason, prompt_tokens=prompt_tokens, generation_tokens=self._tokens, n=params.n,
            max_tokens=params.max_tokens, e2e_seconds=e2e_seconds, first_token_seconds=first,
            queue_seconds=self._queue_seconds)
        if self._tracer is not None:
            self._tracer.record(RequestSpan(
                headers=self._headers, arrival_time=time.time() - e2e_seconds, e2e_seconds=e2e_seconds,
                request_id=self._request.external_id, model=self._metrics.model_name, finish_reason=reason,
                prompt_tokens=prompt_tokens, completion_tokens=self._tokens, n=params.n,
                num_sequences=params.num_sequences, temperature=params.temperature, top_p=params.top_p,
                max_tokens=params.max_tokens, queue_seconds=self._queue_seconds, first_token_seconds=first))
