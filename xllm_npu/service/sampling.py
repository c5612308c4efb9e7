"""From a request body's sampling fields to `SamplingParams`; the model's own defaults where the body is silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xllm_npu.service.errors import quote
from xllm_npu.service.protocol import GenerationBody
from xllm_npu.state.repetition import RepetitionDetection
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams

SAME_NAME = ("n", "best_of", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
             "frequency_penalty", "repetition_penalty", "seed", "include_stop_str_in_output", "ignore_eos",
             "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "use_beam_search",
             "length_penalty", "stream_interval")
TUPLES = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids")
INTEGERS = ("top_k",)  # generation_config may spell them 50.0


def sampling_params(body: GenerationBody, defaults: Mapping[str, float], *, max_tokens: int | None,
                    logprobs: int | None) -> SamplingParams:
    """Checked but for what needs the vocabulary or the prompt."""
    fields: dict[str, Any] = {}
    if not body.use_beam_search:  # which samples nothing
        fields = {name: int(value) if name in INTEGERS else float(value) for name, value in defaults.items()}
    for name in SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    for name in TUPLES:
        value = getattr(body, name)
        if value is not None:
            fields[name] = tuple(value)
    if body.logit_bias:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    if body.repetition_detection is not None:
        given = body.repetition_detection.model_dump(exclude_none=True)
        fields["repetition_detection"] = RepetitionDetection(**given)
    if logprobs is None and body.logprob_token_ids:
        logprobs = 0
    params = SamplingParams(**fields, max_tokens=max_tokens, logprobs=logprobs)
    params.check()
    if body.stream and params.use_beam_search:
        raise InvalidParameter("use_beam_search",
                               "use_beam_search is not available when stream is true: beams are known only at the end.")
    if body.stream and params.best_of is not None and params.best_of > params.n:
        raise InvalidParameter("best_of", "best_of must equal n when streaming: the best are known only at the end.")
    return params


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    # isdecimal alone would let other scripts' digits through, and length bounds the conversion.
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidParameter("logit_bias", f"logit_bias: keys must be token ids, got {quote(key)}.")
    return {int(key): value for key, value in bias.items()}
