"""What one step may still take: tokens, sequences, and, where asked for, seconds."""

from __future__ import annotations

from dataclasses import dataclass

from xllm_npu.scheduling.latency_model import LatencyModel


@dataclass(slots=True)
class StepBudget:
    tokens: int
    seqs: int
    model: LatencyModel | None = None  # None: no latency budget
    seconds: float = float("inf")
    prefill: float = 0.0
    prefill_context: float = 0.0
    decodes: float = 0.0
    decode_context: float = 0.0

    @property
    def exhausted(self) -> bool:
        return self.tokens <= 0 or self.seqs <= 0

    def add_decodes(self, count: int, context: int) -> None:
        self.tokens -= count
        self.seqs -= count
        self.decodes += count
        self.decode_context += context

    def add_prefill(self, tokens: int, start: int) -> None:
        self.tokens -= tokens
        self.seqs -= 1
        self.prefill += tokens
        self.prefill_context += tokens * (start + tokens / 2)

    def features(self) -> tuple[float, ...]:
        return LatencyModel.features(self.prefill, self.prefill_context, self.decodes, self.decode_context)

    def largest_chunk(self, wanted: int, start: int) -> int:
        """The longest chunk of at most `wanted` tokens from position `start` that keeps the step within `seconds`.

        By binary search over the latency model; 0 if none fits. Without a model or a limit: `wanted`.
        """
        if self.model is None or self.seconds == float("inf"):
            return wanted

        def fits(chunk: int) -> bool:
            prefill = self.prefill + chunk
            context = self.prefill_context + chunk * (start + chunk / 2)
            features = LatencyModel.features(prefill, context, self.decodes, self.decode_context)
            seconds = self.model.predict(features) if self.model else None
            return seconds is None or seconds <= self.seconds

        if fits(wanted):
            return wanted
        low, high = 0, wanted
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
