"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from xllm_npu.service import replies
from xllm_npu.service.chat_prompt import echoed_text, encode_messages, prompt_text, response_role
from xllm_npu.service.context import ApiContext, Target
from xllm_npu.service.generation import (
    Outputs,
    UsageCount,
    collect,
    generation_input,
    generation_request,
    submitted,
    truncated,
)
from xllm_npu.service.logprobs import chat_logprobs, prompt_logprobs
from xllm_npu.service.protocol import ChatBody
from xllm_npu.service.replies import ChatChunkChoice, Delta
from xllm_npu.service.sampling import sampling_params
from xllm_npu.service.sequences import SequenceText
from xllm_npu.service.sse import DONE, ChunkFormat, EventStream
from xllm_npu.state.output import RequestOutput, SequenceDelta
from xllm_npu.state.sampling_params import MAX_LOGPROBS, InvalidParameter, SamplingParams


@dataclass(slots=True)
class ChatCall:
    """One request, checked, and what its reply is made with."""

    body: ChatBody
    id: str
    target: Target
    created: int
    params: SamplingParams
    prompt_token_ids: list[int]
    role: str
    echo: str  # put before the reply's text
    prompt_text: str | UnsetType = UNSET  # to be shown

    @property
    def shown_prompt(self) -> list[int] | UnsetType:
        return self.prompt_token_ids if self.body.return_token_ids else UNSET


def chat_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        call = await _read_call(context, request)
        one = generation_input(call.body, call.id, call.prompt_token_ids, call.params, "messages")
        outputs = await submitted(context, request, call.target, [one], bool(call.body.stream))
        if call.body.stream:
            return EventStream(_frames(call, outputs), context.admission)
        return await _whole_reply(context, request, call, outputs)

    return router


async def _read_call(context: ApiContext, request: Request) -> ChatCall:
    body, id, target = await generation_request(context, request, ChatBody, "chatcmpl-")
    params = sampling_params(body, target.master.default_sampling, max_tokens=_max_tokens(body),
                             logprobs=_logprobs(body))
    prompt = truncated(await encode_messages(target.master, body), body, params.max_tokens, target.info)
    return ChatCall(body, id, target, int(time.time()), params, prompt, response_role(body),
                    echoed_text(body) if body.echo else "",
                    await prompt_text(target.master, body) if body.return_prompt_text else UNSET)


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_completion_tokens < 1:
        raise InvalidParameter("max_completion_tokens",
                               f"max_completion_tokens must be at least 1, got {body.max_completion_tokens}.")
    return body.max_completion_tokens


def _logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if top is None or (top == 0 and not body.logprobs):
        return 0 if body.logprobs else None
    if not body.logprobs:
        raise InvalidParameter("top_logprobs", "top_logprobs needs logprobs to be true.")
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidParameter("top_logprobs", f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}.")
    return top


async def _whole_reply(context: ApiContext, request: Request, call: ChatCall, outputs: Outputs) -> Response:
    count = UsageCount(1)
    choices = [SequenceText() for _ in range(call.params.n)]
    reply = replies.ChatCompletion(id=call.id, created=call.created, model=call.target.name, choices=[],
                                   usage=count.usage(), prompt_token_ids=call.shown_prompt,
                                   prompt_text=call.prompt_text)

    def take(index: int, output: RequestOutput) -> None:
        count.update(index, output)
        for delta in output.deltas:
            choices[delta.index].add(delta)
        if output.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    await collect(request, context.admission, outputs, take)
    reply.usage = count.usage()
    reply.choices = [_choice(call, i, choice) for i, choice in enumerate(choices)]
    return replies.json_response(reply)


def _choice(call: ChatCall, index: int, sequence: SequenceText) -> replies.ChatChoice:
    logprobs = None
    if call.params.logprobs is not None:
        logprobs = chat_logprobs(sequence.logprobs, bool(call.body.return_tokens_as_token_ids))
    return replies.ChatChoice(
        index, replies.Message(call.role, call.echo + sequence.text), logprobs, sequence.finish_reason,
        sequence.stop_reason, sequence.token_ids if call.body.return_token_ids else UNSET)


async def _frames(call: ChatCall, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    options = call.body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(with_usage and options and options.continuous_usage_stats)
    format = ChunkFormat(call.id, "chat.completion.chunk", call.created, call.target.name, with_usage)
    count = UsageCount(1)
    begun = False
    try:
        async for index, output in outputs:
            count.update(index, output)
            usage = count.usage() if continuous else None
            data = b""
            if not begun:
                begun = True
                data = _opening(call, format, usage)
            for delta in output.deltas:
                data += _delta_frames(call, format, delta, usage)
            if data:
                yield data
        yield (format.usage_chunk(count.usage()) if with_usage else b"") + DONE
    finally:
        await outputs.aclose()


def _opening(call: ChatCall, format: ChunkFormat, usage: replies.Usage | None) -> bytes:
    data = b""
    shown: dict[str, object] = {}
    if call.body.return_token_ids:
        shown["prompt_token_ids"] = call.prompt_token_ids
    if call.body.return_prompt_text:
        shown["prompt_text"] = call.prompt_text
    for index in range(call.params.n):
        data += format.chunk(ChatChunkChoice(index, Delta(role=call.role, content="")), usage, shown)
        if call.echo:
            data += format.chunk(ChatChunkChoice(index, Delta(content=call.echo)), usage)
    return data


def _delta_frames(call: ChatCall, format: ChunkFormat, delta: SequenceDelta, usage: replies.Usage | None) -> bytes:
    token_ids = delta.token_ids if call.body.return_token_ids and delta.token_ids else UNSET
    data = b""
    # Tokens that are not yet whole characters have no text; they are news only to those who asked for tokens.
    if delta.text or delta.logprobs or token_ids is not UNSET:
        logprobs = None
        if delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, bool(call.body.return_tokens_as_token_ids))
        data = format.chunk(ChatChunkChoice(delta.index, Delta(content=delta.text), logprobs,
                                            token_ids=token_ids), usage)
    if delta.finish_reason is not None:
        data += format.chunk(ChatChunkChoice(delta.index, Delta(), None, delta.finish_reason,
                                             delta.stop_reason), usage)
    return data
