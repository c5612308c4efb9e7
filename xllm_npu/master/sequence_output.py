"""One sequence's way out: its new tokens become text, cut at stop strings, with logprobs beside them.

Collects news until `take` hands them over as one `SequenceDelta`. Two ways of working, with the same result:
a sequence whose text nobody needs before it ends keeps only tokens and decodes them once; every other one
decodes token by token. Knows nothing of other sequences and of who listens.
"""

from __future__ import annotations

from xllm_npu.state.messages import FINISH_NAMES, FINISH_REPETITION, FINISH_STOP, Finished, Logprobs
from xllm_npu.state.output import PositionLogprobs, SequenceDelta, TokenLogprob
from xllm_npu.state.repetition import RepetitionDetector
from xllm_npu.state.sampling_params import SamplingParams
from xllm_npu.text.detokenizer import Detokenizer
from xllm_npu.text.stop_strings import StopStringMatcher
from xllm_npu.text.tokenizer import Tokenizer

REPETITION_DETECTED = "repetition_detected"  # stop_reason of finish_reason "repetition"


class SequenceOutput:
    """State of one sequence, from its first token to its end."""

    __slots__ = (
        "_delta",
        "_detector",
        "_detokenizer",
        "_late",
        "_matcher",
        "_min_tokens",
        "_params",
        "_parts",
        "_text_length",
        "_tokenizer",
        "finished",
        "index",
        "key",
        "logprob_sum",
        "num_tokens",
    )

    def __init__(
        self,
        key: int,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer | None,
        late: bool,
    ) -> None:
        """`detokenizer` None: no text is wanted. `late`: nobody looks before the end."""
        self.key = key
        self.index = index
        self.finished = False
        self.num_tokens = 0
        self.logprob_sum = 0.0
        self._delta = SequenceDelta(index)
        self._parts: list[str] = []  # the delta's text
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._matcher = (
            StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        )
        detection = params.repetition_detection
        self._detector = None if detection is None or detection.off else RepetitionDetector(detection)
        self._min_tokens = params.min_tokens
        self._late = late and self._matcher is None and params.logprobs is None
        self._text_length = 0  # of the decoded text, what the matcher holds back included

    def add(self, token_id: int, logprobs: Logprobs | None, ends_here: bool) -> bool:
        """One new token; `ends_here`: it is the stop or EOS token, whose text is shown only on request.

        Returns True if a stop string is complete: the sequence is finished then.
        """
        delta = self._delta
        delta.token_ids.append(token_id)
        self.num_tokens += 1
        if logprobs is not None:
            self._add_logprobs(delta, logprobs)
        if self._late or self._detokenizer is None:
            return False
        if ends_here and not self._params.include_stop_str_in_output:
            return False
        text = self._detokenizer.push(token_id)
        if text:
            return self._show(text)
        return False

    def repeats(self, token_id: int) -> bool:
        """To be asked once for each token that `add` took and nothing ended: True if repetition ends the sequence."""
        if self._detector is None:
            return False
        if not self._detector.push(token_id) or self.num_tokens < self._min_tokens:
            return False
        self.finish(Finished(self.key, FINISH_REPETITION))
        return True

    def _show(self, text: str) -> bool:
        self._text_length += len(text)
        matcher = self._matcher
        # Stop strings count only after min_tokens, as EOS does.
        if matcher is None or self.num_tokens <= self._min_tokens:
            self._parts.append(text)
            return False
        self._parts.append(matcher.push(text))
        if matcher.matched is None:
            return False
        self.finished = True
        self._delta.finish_reason = FINISH_NAMES[FINISH_STOP]
        self._delta.stop_reason = matcher.matched
        return True

    def finish(self, end: Finished) -> None:
        """The engine ended the sequence; its last token has been added."""
        delta = self._delta
        if self._detokenizer is not None:
            if self._late:
                shown = delta.token_ids
                if end.stop_token_id >= 0 and not self._params.include_stop_str_in_output:
                    shown = shown[:-1]
                self._parts.append(self._detokenizer.push_all(shown))
            if self._show_rest():
                return
        self.finished = True
        delta.finish_reason = FINISH_NAMES[end.reason]
        if end.reason == FINISH_REPETITION:
            delta.stop_reason = REPETITION_DETECTED
        if end.stop_token_id in self._params.stop_token_ids:
            delta.stop_reason = end.stop_token_id

    def _show_rest(self) -> bool:
        """What detokenizer and matcher still hold; True if it completes a stop string."""
        assert self._detokenizer is not None
        rest = self._detokenizer.flush()
        if rest and self._show(rest):
            return True
        if self._matcher is not None:
            self._parts.append(self._matcher.flush())
        return False

    def take(self) -> SequenceDelta:
        """The news since the last call."""
        delta, self._delta = self._delta, SequenceDelta(self.index)
        parts = self._parts
        if parts:
            delta.text = parts[0] if len(parts) == 1 else "".join(parts)
            self._parts = []
        return delta

    @property
    def has_news(self) -> bool:
        return bool(self._delta.token_ids) or self._delta.finish_reason is not None

    @property
    def has_enough_news(self) -> bool:
        """For an output of its own: `stream_interval` tokens, the first one, or the end."""
        count = len(self._delta.token_ids)
        return count >= self._params.stream_interval or 0 < count == self.num_tokens or (
            self._delta.finish_reason is not None)

    def _add_logprobs(self, delta: SequenceDelta, logprobs: Logprobs) -> None:
        self.logprob_sum += logprobs.logprobs[0]
        if delta.logprobs is None:
            delta.logprobs = []
        delta.logprobs.append(position_logprobs(self._tokenizer, logprobs, self._text_length))

    @property
    def mean_logprob(self) -> float:
        return self.logprob_sum / max(1, self.num_tokens)


def position_logprobs(tokenizer: Tokenizer, logprobs: Logprobs, text_offset: int) -> PositionLogprobs:
    """Ids and numbers with the tokens' texts."""
    tokens = [
        TokenLogprob(token_id, tokenizer.token_text(token_id), logprob, rank, tokenizer.token_bytes(token_id))
        for token_id, logprob, rank in zip(logprobs.token_ids, logprobs.logprobs, logprobs.ranks)
    ]
    return PositionLogprobs(tokens[0], tokens[1:], text_offset)
