"""What a caller of the engine receives: text and tokens, one `RequestOutput` at a time.

Filled by master.output_dispatcher from the engine's StepOutputs; read by service/ and llm.py. Every field of a
`SequenceDelta` is news since the previous output of the same sequence, never the whole.
"""

from dataclasses import dataclass, field

# The one `RequestOutput.error` that the request has itself to blame for.
GRAMMAR_TOO_COMPLEX = "The grammar of this request could not be followed any further; the request was ended."


@dataclass(slots=True)
class TokenLogprob:
    token_id: int
    token: str  # text of this token alone
    logprob: float
    rank: int
    bytes: list[int] | None  # its UTF-8 bytes


@dataclass(slots=True)
class PositionLogprobs:
    """The chosen token, and the most likely ones at the same position (which may repeat it)."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    text_offset: int = 0  # where the token's text begins in the sequence's text


@dataclass(slots=True)
class SequenceDelta:
    index: int  # 0..n-1: the choice's index
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None  # one for each of token_ids, if asked for
    finish_reason: str | None = None  # stop | length | abort | error | repetition
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS


@dataclass(slots=True)
class RequestOutput:
    request_id: int
    deltas: list[SequenceDelta]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0  # so far, over all sequences generated (best_of included)
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    vector: bytes | None = None  # float32 values that the prompt became, where the model gives those
    error: str | None = None  # why the request ended without its answer; a sentence for the client
