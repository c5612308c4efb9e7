"""Log probabilities in the three shapes that the APIs have: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from xllm_npu.service.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from xllm_npu.state.output import PositionLogprobs, TokenLogprob

LOWEST = -9999.0  # JSON has no infinity


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # also for NaN


def _token(entry: TokenLogprob, as_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if as_ids else entry.token


def chat_logprobs(positions: Sequence[PositionLogprobs], as_ids: bool = False) -> ChatLogprobs:
    return ChatLogprobs([
        ChatLogprob(_token(p.chosen, as_ids), _finite(p.chosen.logprob), p.chosen.bytes,
                    [TopLogprob(_token(t, as_ids), _finite(t.logprob), t.bytes) for t in p.top])
        for p in positions
    ])


def completion_logprobs(positions: Sequence[PositionLogprobs], num_top: int, text_base: int = 0,
                        as_ids: bool = False) -> CompletionLogprobs:
    """`text_base` is where the sequence's text begins in the choice's text: after an echoed prompt."""
    result = CompletionLogprobs([], [], [] if num_top else None, [])
    for p in positions:
        result.tokens.append(_token(p.chosen, as_ids))
        result.token_logprobs.append(_finite(p.chosen.logprob))
        result.text_offset.append(text_base + p.text_offset)
        if result.top_logprobs is not None:
            result.top_logprobs.append(_top(p, as_ids))
    return result


def _top(position: PositionLogprobs, as_ids: bool) -> dict[str, float]:
    # The chosen token last, so that its value stands where two tokens have the same text.
    return {_token(t, as_ids): _finite(t.logprob) for t in [*position.top, position.chosen]}


def prompt_completion_logprobs(positions: Sequence[PositionLogprobs | None], first_token: str, num_top: int,
                               as_ids: bool = False) -> CompletionLogprobs:
    """An echoed prompt's: the first token has text but no probability."""
    result = CompletionLogprobs([], [], [] if num_top else None, [])
    offset = 0
    for p in positions:
        token = first_token if p is None else p.chosen.token
        result.tokens.append(token if p is None else _token(p.chosen, as_ids))
        result.token_logprobs.append(None if p is None else _finite(p.chosen.logprob))
        result.text_offset.append(offset)
        if result.top_logprobs is not None:
            result.top_logprobs.append(None if p is None else _top(p, as_ids))
        offset += len(token)
    return result


def joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    top = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        top = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(first.tokens + second.tokens, first.token_logprobs + second.token_logprobs, top,
                              first.text_offset + second.text_offset)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    return [None if p is None else _by_id(p) for p in positions]


def _by_id(position: PositionLogprobs) -> dict[str, PromptLogprob]:
    return {str(t.token_id): PromptLogprob(_finite(t.logprob), t.rank, t.token)
            for t in [position.chosen, *position.top]}
