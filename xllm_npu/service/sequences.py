"""What a reply that is sent whole gathers from deltas, one `SequenceText` for each choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from xllm_npu.state.output import PositionLogprobs, SequenceDelta


@dataclass(slots=True)
class SequenceText:
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str = "abort"  # until the sequence says how it ended
    stop_reason: int | str | None = None

    def add(self, delta: SequenceDelta) -> None:
        self.parts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.parts)
