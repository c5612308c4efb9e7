"""Request bodies: their fields, types and bounds, and how a wrong one is reported.

Every field may be null, which means its default, as clients send it. Types are strict: "5" is not a number.
Ranges of sampling fields are `SamplingParams.check`'s; integers are bounded here to what fits in the engine's
rows. Unknown fields are ignored, with a debug line.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from xllm_npu.service.errors import quote
from xllm_npu.service.ignored_fields import note_ignored
from xllm_npu.service.structured import ResponseFormatBody, StructuredOutputsBody
from xllm_npu.service.unsupported import UNSUPPORTED, refuse_unsupported
from xllm_npu.state.sampling_params import InvalidParameter

logger = logging.getLogger("xllm_npu.service")

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Milliseconds = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = list[Int32]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Strings = Annotated[list[str], BeforeValidator(_listed)]  # one string stands for a list of it

# Accepted and of no effect on one model without accounts or stored responses.
IGNORED = frozenset({"user", "store", "metadata", "service_tier", "session_id", "safety_identifier",
                     "prompt_cache_key", "verbosity", "vllm_xargs"})
# Older names of `structured_outputs`, which vLLM takes no more either. Ignored, but not without a word.
GUIDED = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
                    "guided_whitespace_pattern", "guided_decoding_backend", "structural_tag"})


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(),
                              hide_input_in_errors=True)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionDetectionBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    max_pattern_size: Int32 | None = None
    min_pattern_size: Int32 | None = None
    min_count: Int32 | None = None


class GenerationBody(Body):
    """What both generation APIs take."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Int32 | None = None
    n: Int32 | None = None
    best_of: Int32 | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: RepetitionDetectionBody | None = None
    seed: Int64 | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    stop: Strings | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int32 | None = None
    logprob_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    truncate_prompt_tokens: Int32 | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Int32 | None = None
    request_id: Annotated[str, Field(pattern=r"^[\w.:/+=@-]{1,128}$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    offline: bool | None = None
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    ttlt_slo_ms: Milliseconds | None = None


Conversation = Annotated[list[dict[str, Any]], Field(min_length=1)]


class ChatFields(Body):
    """What turning messages into a prompt takes; /tokenize has it too."""

    messages: Conversation
    tools: list[Any] | None = None  # taken apart, as tool_choice is, in tools.py
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatBody(ChatFields, GenerationBody):
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Int32 | None = None
    return_prompt_text: bool | None = None


class BatchChatBody(ChatBody):
    messages: Annotated[list[Conversation], Field(min_length=1)]  # type: ignore[assignment]


class CompletionBody(GenerationBody):
    prompt: Any  # str, list of str, list of ids, list of lists of ids: taken apart in completions.py
    logprobs: Int32 | None = None


class TokenizeBody(Body):
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatFields):
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: TokenIds


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: dict[str, Any]) -> B:
    """`body` as a `kind`, or InvalidParameter for the first field that is wrong."""
    refuse_unsupported(body, kind.model_fields)
    guided = GUIDED & body.keys()
    for name in guided:
        _warn_of_guided(name)
    unknown = body.keys() - kind.model_fields.keys() - IGNORED - guided - UNSUPPORTED.keys()
    note_ignored(unknown | guided)
    if unknown:
        logger.debug("unknown request fields ignored: %s", ", ".join(quote(name) for name in sorted(unknown)[:20]))
    return validated(kind, body)


@cache
def _warn_of_guided(name: str) -> None:
    """Once: clients must not be able to fill the log."""
    logger.warning("request field ignored, use structured_outputs: %s", name)


M = TypeVar("M", bound=BaseModel)


def validated(kind: type[M], value: dict[str, Any], where: str = "") -> M:
    """`value`, which stands at `where` in the request, as a `kind`; InvalidParameter as for `parse`."""
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        raise _first_error(exc, value, where) from None


def _first_error(exc: ValidationError, body: dict[str, Any], where: str) -> InvalidParameter:
    error = exc.errors(include_url=False, include_context=False)[0]
    path = [step for step in error["loc"] if step != "[key]"]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    param = (where + param).lstrip(".")[:200]
    if error["type"] == "missing":
        return InvalidParameter(param, f"{param} is required.")
    value: Any = body
    for step in path:
        value = value[step]
    return InvalidParameter(param, f"{param}: {error['msg']}, got {quote(value)}.")
