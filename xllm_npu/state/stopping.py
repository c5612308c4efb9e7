"""When a sequence ends: length, end-of-sequence token, stop token ids.

The scheduler checks whole columns of these at once (`BatchTable.max_total`, `stop_ids`); this module derives them and
holds the plain rule that the vectorised one is tested against. Stop strings are text and belong to the text side.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from xllm_npu.state.messages import FINISH_LENGTH, FINISH_STOP
from xllm_npu.state.sampling_params import SamplingParams


def max_total_tokens(params: SamplingParams, num_prompt: int, max_model_len: int) -> int:
    """Tokens (prompt and generated) at which a sequence ends by length."""
    if params.max_tokens is None:
        return max_model_len
    return min(num_prompt + params.max_tokens, max_model_len)


def stop_token_ids(params: SamplingParams, eos_token_ids: Seq[int]) -> list[int]:
    """Tokens that end the sequence. `stop_token_ids` adds to the model's; `ignore_eos` switches the model's off.

    A grammar that is complete allows nothing but the model's, so that with one they end the sequence in any case.
    """
    ids = dict.fromkeys(params.stop_token_ids)
    if not params.ignore_eos or params.grammar is not None:
        ids.update(dict.fromkeys(eos_token_ids))
    return list(ids)


class StoppingChecker:
    """The plain rule for one sequence, in the order length, then EOS and stop ids."""

    def __init__(
        self, params: SamplingParams, num_prompt: int, max_model_len: int, eos_token_ids: Seq[int]
    ) -> None:
        self.num_prompt = num_prompt
        self.max_total = max_total_tokens(params, num_prompt, max_model_len)
        self.min_tokens = params.min_tokens
        self.stop_ids = frozenset(stop_token_ids(params, eos_token_ids))

    def check(self, num_tokens: int, last_token: int) -> int | None:
        """The finish reason after `last_token` became token number `num_tokens`, or None.

        A stop token wins over the length, as clients of the OpenAI API expect.
        """
        if last_token in self.stop_ids and num_tokens - self.num_prompt >= self.min_tokens:
            return FINISH_STOP
        if num_tokens >= self.max_total:
            return FINISH_LENGTH
        return None
