"""When a request's tokens came, for the metrics."""

from __future__ import annotations

import time

from xllm_npu.metrics import Metrics
from xllm_npu.state.messages import AddRequest, PromptInfo
from xllm_npu.state.output import RequestOutput


class RequestTiming:
    """One open request's clock. Told of every output of the request, it feeds `Metrics`."""

    __slots__ = ("_began", "_first", "_last", "_metrics", "_queue_seconds", "_request", "_tokens", "engine")

    def __init__(self, request: AddRequest, metrics: Metrics) -> None:
        self._request, self._metrics = request, metrics
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
        self._metrics.of_engine(self.engine).on_finished(
            reason, prompt_tokens=len(self._request.prompt) // 4, generation_tokens=self._tokens, n=params.n,
            max_tokens=params.max_tokens, e2e_seconds=time.monotonic() - self._began, first_token_seconds=first,
            queue_seconds=self._queue_seconds)
