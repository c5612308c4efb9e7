"""POST /v1/chat/completions, and /v1/chat/completions/batch for several conversations at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from xllm_npu.service import replies
from xllm_npu.service.chat_chunks import event_deltas
from xllm_npu.service.chat_prompt import echoed_text, response_role
from xllm_npu.service.chat_turn import ChatTurn, SequenceEvents, WholeAnswer, chat_turn
from xllm_npu.service.context import ApiContext
from xllm_npu.service.generation import Outputs, UsageCount, collect, generation_request, submitted
from xllm_npu.service.logprobs import chat_logprobs, prompt_logprobs
from xllm_npu.service.protocol import BatchChatBody, ChatBody
from xllm_npu.service.replies import ChatChunkChoice, Delta
from xllm_npu.service.sse import DONE, ChunkFormat, EventStream
from xllm_npu.state.output import PositionLogprobs, RequestOutput, SequenceDelta
from xllm_npu.state.sampling_params import InvalidParameter

MAX_CONVERSATIONS = 128  # of a batch


def chat_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, id, target = await generation_request(context, request, ChatBody, "chatcmpl-")
        turn = await chat_turn(target, body, id)
        outputs = await submitted(context, request, target, [turn.input()], bool(body.stream))
        if body.stream:
            return EventStream(_frames(turn, outputs), context.admission)
        return await _whole_reply(context, request, [turn], outputs)

    @router.post("/v1/chat/completions/batch")
    async def chat_completions_batch(request: Request) -> Response:
        """One choice a conversation, in their order; what a single one may ask, but for a stream, n and beams."""
        body, id, target = await generation_request(context, request, BatchChatBody, "chatcmpl-")
        turns = [await chat_turn(target, one, id) for one in _conversations(body)]
        outputs = await submitted(context, request, target, [turn.input() for turn in turns], False)
        return await _whole_reply(context, request, turns, outputs)

    return router


def _conversations(body: BatchChatBody) -> list[ChatBody]:
    for name, alone in (("stream", body.stream), ("n", (body.n or 1) != 1), ("best_of", (body.best_of or 1) != 1),
                        ("use_beam_search", body.use_beam_search)):
        if alone:
            raise InvalidParameter(name, f"{name} is not available for a batch of conversations.")
    if len(body.messages) > MAX_CONVERSATIONS:
        raise InvalidParameter("messages", f"messages takes at most {MAX_CONVERSATIONS} conversations, got "
                               f"{len(body.messages)}.")
    shared = {name: getattr(body, name) for name in body.model_fields_set if name != "messages"}
    return [ChatBody.model_construct(**shared, messages=messages) for messages in body.messages]


@dataclass(slots=True)
class _Choice:
    """One choice of a reply that is sent whole."""

    turn: ChatTurn
    events: SequenceEvents
    answer: WholeAnswer = field(default_factory=WholeAnswer)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def add(self, delta: SequenceDelta) -> None:
        for event in self.events.push(delta):
            self.answer.add(event)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()

    def reply(self, index: int) -> replies.ChatChoice:
        body = self.turn.body
        logprobs = None
        if self.turn.params.logprobs is not None:
            logprobs = chat_logprobs(self.logprobs, bool(body.return_tokens_as_token_ids))
        return replies.ChatChoice(
            index, self._message(), logprobs, self.events.finish_reason or "abort", self.events.stop_reason,
            self.token_ids if body.return_token_ids else UNSET)

    def _message(self) -> replies.Message:
        body, answer = self.turn.body, self.answer
        content = (echoed_text(body) if body.echo else "") + answer.content
        message = replies.Message(response_role(body), content)
        if self.turn.has_reasoning:
            message.reasoning = message.reasoning_content = answer.reasoning or None
        if answer.calls:
            message.content = content or None
            message.tool_calls = [replies.ToolCall(call.id or "", replies.Function(call.name, call.arguments))
                                  for call in answer.calls]
        return message


async def _whole_reply(context: ApiContext, request: Request, turns: Sequence[ChatTurn], outputs: Outputs) -> Response:
    count = UsageCount(len(turns))
    choices = [[_Choice(turn, turn.sequence()) for _ in range(turn.params.n)] for turn in turns]
    first = turns[0]
    alone = len(turns) == 1
    reply = replies.ChatCompletion(
        id=first.id, created=first.created, model=first.target.name, choices=[], usage=count.usage(),
        prompt_token_ids=first.prompt_token_ids if alone and first.body.return_token_ids else UNSET,
        prompt_text=first.prompt_text if alone and first.body.return_prompt_text else UNSET)

    def take(index: int, output: RequestOutput) -> None:
        count.update(index, output)
        for delta in output.deltas:
            choices[index][delta.index].add(delta)
        if output.prompt_logprobs is not None and alone:
            reply.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)

    await collect(request, context.admission, outputs, take)
    every = [choice for of_turn in choices for choice in of_turn]
    reply.usage = await _usage(count, first, [choice.events for choice in every])
    reply.choices = [choice.reply(i) for i, choice in enumerate(every)]
    return replies.json_response(reply)


async def _usage(count: UsageCount, turn: ChatTurn, sequences: Sequence[SequenceEvents]) -> replies.Usage:
    usage = count.usage()
    if turn.has_reasoning:
        reasoning = sum([await one.count_reasoning_tokens() for one in sequences])
        usage.completion_tokens_details = replies.CompletionTokensDetails(min(reasoning, usage.completion_tokens))
    return usage


async def _frames(turn: ChatTurn, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    options = turn.body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(with_usage and options and options.continuous_usage_stats)
    format = ChunkFormat(turn.id, "chat.completion.chunk", turn.created, turn.target.name, with_usage)
    count = UsageCount(1)
    sequences = [turn.sequence() for _ in range(turn.params.n)]
    begun = False
    try:
        async for index, output in outputs:
            count.update(index, output)
            usage = count.usage() if continuous else None
            data = b""
            if not begun:
                begun = True
                data = _opening(turn, format, usage)
            for delta in output.deltas:
                data += _delta_frames(turn, format, sequences[delta.index], delta, usage)
            if data:
                yield data
        yield (format.usage_chunk(await _usage(count, turn, sequences)) if with_usage else b"") + DONE
    finally:
        await outputs.aclose()


def _opening(turn: ChatTurn, format: ChunkFormat, usage: replies.Usage | None) -> bytes:
    data, body = b"", turn.body
    shown: dict[str, object] = {}
    if body.return_token_ids:
        shown["prompt_token_ids"] = turn.prompt_token_ids
    if body.return_prompt_text:
        shown["prompt_text"] = turn.prompt_text
    echo = echoed_text(body) if body.echo else ""
    for index in range(turn.params.n):
        data += format.chunk(ChatChunkChoice(index, Delta(role=response_role(body), content="")), usage, shown)
        if echo:
            data += format.chunk(ChatChunkChoice(index, Delta(content=echo)), usage)
    return data


def _delta_frames(turn: ChatTurn, format: ChunkFormat, sequence: SequenceEvents, delta: SequenceDelta,
                  usage: replies.Usage | None) -> bytes:
    deltas = event_deltas(sequence.push(delta))
    token_ids: list[int] | UnsetType = UNSET
    if turn.body.return_token_ids and delta.token_ids:
        token_ids = delta.token_ids
    logprobs = None
    if delta.logprobs:
        logprobs = chat_logprobs(delta.logprobs, bool(turn.body.return_tokens_as_token_ids))
    # Tokens that are not yet text are news only to those who asked for tokens.
    if not deltas and (logprobs is not None or token_ids is not UNSET):
        deltas = [Delta(content="")]
    data = b""
    for i, one in enumerate(deltas):
        choice = ChatChunkChoice(delta.index, one)
        if i == 0:
            choice.logprobs, choice.token_ids = logprobs, token_ids
        data += format.chunk(choice, usage)
    if sequence.finish_reason is not None and delta.finish_reason is not None:
        data += format.chunk(ChatChunkChoice(delta.index, Delta(), None, sequence.finish_reason,
                                             sequence.stop_reason), usage)
    return data
