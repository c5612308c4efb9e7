"""The door: a client's wish, already tokens, becomes an `AddRequest` that the engine can always carry out.

Everything that depends on the model and on the engine's size is checked here, and only here: `make` raises
`InvalidParameter` with the numbers, or returns a request that fits. Ranges that depend on neither are
`SamplingParams.check`'s. Knows no HTTP, no text but stop strings and bad words, and keeps nothing of a
request.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from xllm_npu.state.messages import AddRequest, EngineReady
from xllm_npu.state.sampling_params import MAX_BAD_WORDS, MAX_LOGPROBS, InvalidParameter, SamplingParams
from xllm_npu.text.tokenizer import Tokenizer

MAX_CACHE_SALT_CHARS = 128
MAX_STOP_STRING_CHARS = 1024
MAX_EXTERNAL_ID_CHARS = 256
INT32_MAX = 2**31 - 1
GIVES_VECTORS = ("This model gives embeddings or scores and generates no text. Its routes are /v1/embeddings, "
                 "/pooling, /classify, /score and /rerank, as far as the model goes.")
GENERATES = ("This model generates text. For embeddings or scores start the server with a model that gives them, or "
             "with --runner pooling.")


@dataclass(slots=True, kw_only=True)
class GenerationInput:
    """What a client wants generated."""

    prompt_token_ids: Sequence[int] | npt.NDArray[np.int32]
    params: SamplingParams
    external_id: str = ""
    prompt_param: str = "prompt"  # the API field that the prompt came in, for errors
    priority: int = 0
    offline: bool = False
    ttft_slo_ms: int = 0
    tpot_slo_ms: int = 0
    ttlt_slo_ms: int = 0
    cache_salt: str = ""
    lora_id: int = 0  # of a loaded adapter; 0: none
    arrival_time: float = field(default_factory=time.time)
    truncate_prompt_tokens: int | None = (
        None  # keep so many at most; -1: as many as leave room for the answer
    )
    truncation_side: str = "left"  # the side where tokens are dropped


POOLING_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


@dataclass(slots=True, kw_only=True)
class PoolingInput:
    """A prompt that is to become a vector; ids of token type t are t times the vocabulary's size and up."""

    prompt_token_ids: Sequence[int] | npt.NDArray[np.int32]
    external_id: str = ""
    prompt_param: str = "input"
    priority: int = 0
    offline: bool = False
    cache_salt: str = ""
    arrival_time: float = field(default_factory=time.time)


class RequestFactory:
    """Makes requests for one engine. Request ids count up from 1."""

    def __init__(self, tokenizer: Tokenizer, info: EngineReady, max_logprobs: int = MAX_LOGPROBS) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._max_logprobs = max_logprobs
        self._ids = itertools.count(1)
        self._kv_tokens = info.num_kv_blocks * info.block_size

    @property
    def eos_token_ids(self) -> list[int]:
        return self._info.eos_token_ids

    def new_id(self) -> int:
        return next(self._ids)

    def make(self, request: GenerationInput) -> AddRequest:
        """The request for the engine. Raises InvalidParameter, and nothing else, for what cannot be done."""
        if self._info.pooling is not None:
            raise InvalidParameter("model", GIVES_VECTORS)
        params = request.params
        params.check(self._info.vocab_size)
        self._check_params(params)
        _check_fields(request)
        prompt = self._truncated(self._prompt_array(request), request)
        self._check_length(prompt.size, request.prompt_param)
        params = self._completed(params, prompt.size)
        slo = not request.offline  # offline requests have no deadlines
        return AddRequest(
            request_id=self.new_id(),
            external_id=request.external_id,
            prompt=prompt.tobytes(),
            params=params,
            arrival_time=request.arrival_time,
            priority=request.priority,
            offline=request.offline,
            ttft_slo_ms=request.ttft_slo_ms * slo,
            tpot_slo_ms=request.tpot_slo_ms * slo,
            ttlt_slo_ms=request.ttlt_slo_ms * slo,
            cache_salt=request.cache_salt,
            lora_id=request.lora_id,
        )

    def make_pooling(self, request: PoolingInput) -> AddRequest:
        """The same for a prompt that becomes a vector."""
        pooling, param = self._info.pooling, request.prompt_param
        if pooling is None:
            raise InvalidParameter("model", GENERATES)
        _check_common(request)
        prompt = self._prompt_array(request, self._info.vocab_size * pooling.num_types)
        longest = min(self._info.max_model_len, self._kv_tokens)
        if not self._info.chunked_prefill:
            longest = min(longest, self._info.max_tokens_per_batch)
        if prompt.size > longest:
            raise InvalidParameter(
                param,
                f"The input has {prompt.size} tokens, and this model takes {longest} at most. Shorten it, or set "
                "truncate_prompt_tokens (-1: what the model takes).",
            )
        return AddRequest(
            request_id=self.new_id(), external_id=request.external_id, prompt=prompt.tobytes(), params=POOLING_PARAMS,
            arrival_time=request.arrival_time, priority=request.priority, offline=request.offline,
            cache_salt=request.cache_salt)

    def _check_params(self, p: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(p, name)
            if value is not None and value > self._max_logprobs:
                raise InvalidParameter(
                    name,
                    f"{name} must be at most {self._max_logprobs} (the server's "
                    f"--max-logprobs), got {value}.",
                )
        if p.stop and not p.detokenize:
            raise InvalidParameter("stop", "stop strings are found in text: they need detokenize to be true.")
        too_long = max(map(len, p.stop), default=0)
        if too_long > MAX_STOP_STRING_CHARS:
            raise InvalidParameter(
                "stop",
                f"A stop string may have {MAX_STOP_STRING_CHARS} characters at most, got one of {too_long}.",
            )

    def _prompt_array(
        self, request: GenerationInput | PoolingInput, vocab_size: int = 0
    ) -> npt.NDArray[np.int32]:
        """[num_prompt_tokens] int32, all in the vocabulary."""
        param, size = request.prompt_param, vocab_size or self._info.vocab_size
        if len(request.prompt_token_ids) == 0:
            raise InvalidParameter(param, "The prompt is empty: it must have at least one token.")
        try:
            ids = np.asarray(request.prompt_token_ids)
        except ValueError:  # a ragged list
            ids = np.empty((0, 0), np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iuO":  # O: integers above 64 bits, out of any vocabulary
            raise InvalidParameter(param, "The prompt must be a flat list of token ids.")
        wrong = ids[(ids < 0) | (ids >= size)]
        if wrong.size:
            raise InvalidParameter(
                param,
                f"The prompt has token id {wrong[0]}, which is not in the vocabulary "
                f"(0 to {size - 1}).",
            )
        return ids.astype(np.int32)

    def _truncated(self, prompt: npt.NDArray[np.int32], request: GenerationInput) -> npt.NDArray[np.int32]:
        keep, limit = request.truncate_prompt_tokens, self._info.max_model_len
        if keep is None:
            return prompt
        if keep == -1:
            keep = max(1, min(limit, self._kv_tokens) - (request.params.max_tokens or 1))
        if not 1 <= keep <= limit:
            raise InvalidParameter(
                "truncate_prompt_tokens", f"truncate_prompt_tokens must be -1 or in [1, {limit}], got {keep}."
            )
        return prompt[-keep:] if request.truncation_side == "left" else prompt[:keep]

    def _check_length(self, length: int, param: str) -> None:
        limit = self._info.max_model_len
        if length >= limit:
            raise InvalidParameter(
                param,
                f"This model's maximum context length is {limit} tokens. However, your "
                f"prompt has {length} tokens, which leaves no room for an answer. Shorten "
                "it, or set truncate_prompt_tokens.",
            )
        if not self._info.chunked_prefill and length > self._info.max_tokens_per_batch:
            raise InvalidParameter(
                param,
                f"The prompt has {length} tokens, and this server computes a prompt in one "
                f"step of at most {self._info.max_tokens_per_batch} tokens. Shorten it, or "
                "start the server with chunked prefill or a larger "
                "--max-tokens-per-batch.",
            )
        if length >= self._kv_tokens:
            raise InvalidParameter(
                param,
                f"The prompt has {length} tokens, and this server's KV cache holds "
                f"{self._kv_tokens} ({self._info.num_kv_blocks} blocks of "
                f"{self._info.block_size}). Shorten it, or start the server with a larger "
                "KV cache.",
            )

    def _completed(self, p: SamplingParams, length: int) -> SamplingParams:
        """With max_tokens that fit, bad words as tokens, and the logprobs that best_of chooses by."""
        room = self._info.max_model_len - length
        max_tokens = min(p.max_tokens or room, room)
        if length + max_tokens > self._kv_tokens:
            if p.max_tokens is not None:
                need = -(-(length + max_tokens) // self._info.block_size)
                raise InvalidParameter(
                    "max_tokens",
                    f"A prompt of {length} and an answer of up to {max_tokens} tokens "
                    f"need {need} KV blocks, and the server has {self._info.num_kv_blocks}. Ask "
                    f"for at most {self._kv_tokens - length} tokens.",
                )
            max_tokens = self._kv_tokens - length
        if p.min_tokens > max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens is {p.min_tokens}, but a prompt of {length} tokens leaves "
                f"room for {max_tokens}.",
            )
        chooses = p.best_of is not None and p.best_of > p.n
        return replace(
            p,
            max_tokens=max_tokens,
            bad_words_token_ids=self._bad_words(p),
            logprobs=0 if chooses and p.logprobs is None else p.logprobs,
        )

    def _bad_words(self, p: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the beginning of a text and after a blank."""
        found = dict.fromkeys(p.bad_words_token_ids)
        size = self._info.vocab_size
        if not all(ids and min(ids) >= 0 and max(ids) < size for ids in found):
            raise InvalidParameter(
                "bad_words_token_ids", f"bad_words_token_ids must be lists of token ids (0 to {size - 1})."
            )
        for word in p.bad_words:
            bare = word.lstrip(" ")
            ids = [
                tuple(self._tokenizer.encode(blank + bare, add_special_tokens=False)) for blank in ("", " ")
            ]
            if not bare or not all(ids):
                raise InvalidParameter(
                    "bad_words", f"bad_words has {word!r}, which has no tokens of its own."
                )
            # A tokenizer may have more tokens than the model; those it cannot write anyway.
            found.update(dict.fromkeys(i for i in ids if max(i) < size))
        if len(found) > 2 * MAX_BAD_WORDS:
            raise InvalidParameter("bad_words", f"bad_words takes at most {MAX_BAD_WORDS} words.")
        return tuple(found)


def _check_common(request: GenerationInput | PoolingInput) -> None:
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidParameter(
            "cache_salt",
            f"cache_salt may have {MAX_CACHE_SALT_CHARS} characters at most, got {len(request.cache_salt)}.",
        )
    if len(request.external_id) > MAX_EXTERNAL_ID_CHARS:
        raise InvalidParameter(
            "request_id", f"request_id may have {MAX_EXTERNAL_ID_CHARS} characters at most."
        )
    if abs(request.priority) > INT32_MAX:
        raise InvalidParameter(
            "priority", f"priority must be in [-{INT32_MAX}, {INT32_MAX}], got {request.priority}."
        )


def _check_fields(request: GenerationInput) -> None:
    _check_common(request)
    if request.truncation_side not in ("left", "right"):
        raise InvalidParameter(
            "truncation_side", f"truncation_side must be 'left' or 'right', got {request.truncation_side!r}."
        )
    for name in ("ttft_slo_ms", "tpot_slo_ms", "ttlt_slo_ms"):
        value = getattr(request, name)
        if not 0 <= value <= INT32_MAX:
            raise InvalidParameter(name, f"{name} must be in [0, {INT32_MAX}], got {value}.")
