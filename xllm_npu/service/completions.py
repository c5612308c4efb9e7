"""POST /v1/completions: one or many prompts, as text or as token ids; choice i of prompt p has index p * n + i."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from xllm_npu.service import replies
from xllm_npu.service.context import ApiContext, Target
from xllm_npu.service.errors import quote
from xllm_npu.service.generation import (
    Outputs,
    UsageCount,
    collect,
    generation_input,
    generation_request,
    submitted,
    truncated,
)
from xllm_npu.service.logprobs import completion_logprobs, joined, prompt_completion_logprobs, prompt_logprobs
from xllm_npu.service.protocol import CompletionBody
from xllm_npu.service.replies import CompletionChoice, CompletionLogprobs
from xllm_npu.service.sampling import sampling_params
from xllm_npu.service.sequences import SequenceText
from xllm_npu.service.sse import DONE, ChunkFormat, EventStream
from xllm_npu.service.structured import checked_grammar
from xllm_npu.state.output import PositionLogprobs, RequestOutput, SequenceDelta
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams

MAX_PROMPTS = 1024
MAX_BEAMS = 1024  # over all prompts: each is a request of its own, prompt included, at every step
DEFAULT_MAX_TOKENS = 16  # OpenAI's
Prompt = str | list[int]


@dataclass(slots=True)
class EncodedPrompt:
    param: str  # the field's name, for errors
    token_ids: list[int]
    text: str  # "" unless it is echoed


@dataclass(slots=True)
class CompletionCall:
    """One request, checked, and what its reply is made with."""

    body: CompletionBody
    id: str
    target: Target
    created: int
    params: SamplingParams
    prompts: list[EncodedPrompt]
    prompt_only: bool  # echo with max_tokens 0: score the prompt, drop what is generated

    @property
    def as_ids(self) -> bool:
        return bool(self.body.return_tokens_as_token_ids)

    @property
    def num_top(self) -> int:
        return self.body.logprobs or 0


def completions_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        call = await _read_call(context, request)
        outputs = await submitted(context, request, call.target, [
            generation_input(call.body, call.id, p.token_ids, call.params, p.param) for p in call.prompts],
            bool(call.body.stream))
        if call.body.stream:
            return EventStream(_frames(call, outputs), context.admission)
        return await _whole_reply(context, request, call, outputs)

    return router


async def _read_call(context: ApiContext, request: Request) -> CompletionCall:
    body, id, target = await generation_request(context, request, CompletionBody, "cmpl-")
    given = list_prompts(body.prompt)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_only = bool(body.echo) and max_tokens == 0
    params = sampling_params(body, target.master.default_sampling, max_tokens=1 if prompt_only else max_tokens,
                             logprobs=body.logprobs)
    params = replace(params, grammar=await checked_grammar(target.master, body))
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=body.logprobs)
    if params.use_beam_search and len(given) * params.num_sequences > MAX_BEAMS:
        raise InvalidParameter("prompt", "prompt: with use_beam_search, prompts times beams may be at most "
                               f"{MAX_BEAMS}, got {len(given)} times {params.num_sequences}.")
    names = ["prompt"] if len(given) == 1 else [f"prompt[{i}]" for i in range(len(given))]
    prompts = [await _encode(target, body, params, name, prompt) for name, prompt in zip(names, given)]
    return CompletionCall(body, id, target, int(time.time()), params, prompts, prompt_only)


def list_prompts(prompt: Any) -> list[Prompt]:
    """The four forms that `prompt` may have, as one list."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidParameter("prompt", "prompt must be a string, a list of strings, a list of token ids or a list "
                               f"of such lists, got {quote(prompt)}.")
    if not prompt:
        raise InvalidParameter("prompt", "prompt must not be empty.")
    if _are_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidParameter("prompt", f"prompt takes at most {MAX_PROMPTS} prompts, got {len(prompt)}.")
    for i, one in enumerate(prompt):
        if not (isinstance(one, str) or (isinstance(one, list) and one and _are_ids(one))):
            raise InvalidParameter(f"prompt[{i}]", f"prompt[{i}] must be a string or a list of token ids, "
                                   f"got {quote(one)}.")
    return prompt


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


async def _encode(target: Target, body: CompletionBody, params: SamplingParams, name: str,
                  prompt: Prompt) -> EncodedPrompt:
    if isinstance(prompt, str):
        try:
            whole = await target.master.text.encode(prompt, body.add_special_tokens is not False)
        except InvalidParameter as exc:
            raise InvalidParameter(name, exc.message) from None
    else:
        _check_ids(target, name, prompt)
        whole = prompt
    token_ids = truncated(whole, body, params.max_tokens, target.info)
    text = ""
    if body.echo:
        unchanged = isinstance(prompt, str) and len(token_ids) == len(whole)
        text = prompt if unchanged and isinstance(prompt, str) else await target.master.text.decode(token_ids)
    return EncodedPrompt(name, token_ids, text)


def _check_ids(target: Target, name: str, token_ids: list[int]) -> None:
    low, high = min(token_ids), max(token_ids)
    vocab_size = target.info.vocab_size
    if low < 0 or high >= vocab_size:
        raise InvalidParameter(name, f"{name} has token id {quote(low if low < 0 else high)}, which is not in the "
                               f"vocabulary (0 to {vocab_size - 1}).")


async def _whole_reply(context: ApiContext, request: Request, call: CompletionCall, outputs: Outputs) -> Response:
    n = call.params.n
    count = UsageCount(len(call.prompts))
    sequences = [[SequenceText() for _ in range(n)] for _ in call.prompts]
    prompt_positions: list[list[PositionLogprobs | None] | None] = [None] * len(call.prompts)

    def take(index: int, output: RequestOutput) -> None:
        count.update(index, output)
        for delta in output.deltas:
            sequences[index][delta.index].add(delta)
        if output.prompt_logprobs is not None:
            prompt_positions[index] = output.prompt_logprobs

    await collect(request, context.admission, outputs, take)
    choices = []
    for p, prompt in enumerate(call.prompts):
        for i, sequence in enumerate(sequences[p]):
            choices.append(_choice(call, p * n + i, prompt, sequence, prompt_positions[p]))
    usage = count.usage()
    if call.prompt_only:
        usage = replies.usage(usage.prompt_tokens, 0, usage.prompt_tokens_details.cached_tokens)
    return replies.json_response(replies.Completion(id=call.id, created=call.created, model=call.target.name,
                                                    choices=choices, usage=usage))


def _choice(call: CompletionCall, index: int, prompt: EncodedPrompt, sequence: SequenceText,
            positions: list[PositionLogprobs | None] | None) -> CompletionChoice:
    if call.prompt_only:
        sequence = SequenceText(finish_reason="length")
    logprobs = None
    if call.params.logprobs is not None:
        logprobs = completion_logprobs(sequence.logprobs, call.num_top, len(prompt.text), call.as_ids)
        logprobs = joined(_echo_logprobs(call, prompt, positions), logprobs)
    choice = CompletionChoice(index, prompt.text + sequence.text, logprobs, sequence.finish_reason,
                              sequence.stop_reason)
    if call.body.prompt_logprobs is not None and positions is not None:
        choice.prompt_logprobs = prompt_logprobs(positions)
    if call.body.return_token_ids:
        choice.prompt_token_ids = prompt.token_ids
        choice.token_ids = sequence.token_ids
    return choice


def _echo_logprobs(call: CompletionCall, prompt: EncodedPrompt,
                   positions: list[PositionLogprobs | None] | None) -> CompletionLogprobs | None:
    if not call.body.echo or positions is None:
        return None
    first = call.target.master.tokenizer.token_text(prompt.token_ids[0])
    if call.as_ids:
        first = f"token_id:{prompt.token_ids[0]}"
    return prompt_completion_logprobs(positions, first, call.num_top, call.as_ids)


async def _frames(call: CompletionCall, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    options = call.body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(with_usage and options and options.continuous_usage_stats)
    format = ChunkFormat(call.id, "text_completion", call.created, call.target.name, with_usage)
    count = UsageCount(len(call.prompts))
    begun: set[int] = set()
    try:
        async for index, output in outputs:
            count.update(index, output)
            usage = count.usage() if continuous else None
            data = b""
            if index not in begun:
                begun.add(index)
                data = _opening(call, format, index, output, usage)
            for delta in output.deltas:
                data += _delta_frames(call, format, index, delta, usage)
            if data:
                yield data
        yield (format.usage_chunk(count.usage()) if with_usage else b"") + DONE
    finally:
        await outputs.aclose()


def _opening(call: CompletionCall, format: ChunkFormat, index: int, output: RequestOutput,
             usage: replies.Usage | None) -> bytes:
    """What comes before a prompt's own text: the echoed prompt, and its ids where asked for."""
    prompt = call.prompts[index]
    if not call.body.echo and not call.body.return_token_ids:
        return b""
    logprobs = None
    if call.params.logprobs is not None:
        logprobs = _echo_logprobs(call, prompt, output.prompt_logprobs)
    ids = prompt.token_ids if call.body.return_token_ids else UNSET
    return b"".join(
        format.chunk(CompletionChoice(index * call.params.n + i, prompt.text, logprobs, prompt_token_ids=ids), usage)
        for i in range(call.params.n))


def _delta_frames(call: CompletionCall, format: ChunkFormat, index: int, delta: SequenceDelta,
                  usage: replies.Usage | None) -> bytes:
    choice = index * call.params.n + delta.index
    data = b""
    token_ids = delta.token_ids if call.body.return_token_ids and delta.token_ids else UNSET
    if not call.prompt_only and (delta.text or delta.logprobs or token_ids is not UNSET):
        logprobs = None
        if delta.logprobs:
            base = len(call.prompts[index].text)
            logprobs = completion_logprobs(delta.logprobs, call.num_top, base, call.as_ids)
        data = format.chunk(CompletionChoice(choice, delta.text, logprobs, token_ids=token_ids), usage)
    if delta.finish_reason is not None:
        data += format.chunk(CompletionChoice(choice, "", None, delta.finish_reason, delta.stop_reason), usage)
    return data
