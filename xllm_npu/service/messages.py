"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same turns as chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from xllm_npu.service import messages_events, request_id
from xllm_npu.service.body import read_json
from xllm_npu.service.chat_prompt import encode_messages
from xllm_npu.service.chat_turn import ChatTurn, chat_turn
from xllm_npu.service.context import ApiContext, Target
from xllm_npu.service.errors import renamed_faults
from xllm_npu.service.generation import Outputs, UsageCount, collect, submitted
from xllm_npu.service.messages_errors import error_event
from xllm_npu.service.messages_events import MessageBlocks, frame
from xllm_npu.service.messages_request import RENAMED, CountTokensBody, MessagesBody, chat_body
from xllm_npu.service.protocol import ChatBody, parse
from xllm_npu.service.sse import EventStream
from xllm_npu.service.tools import read_tools
from xllm_npu.service.turn_grammar import BUDGET
from xllm_npu.state.output import RequestOutput
from xllm_npu.state.sampling_params import InvalidParameter

NOT_ENDED: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}


def messages_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages")
    async def messages(request: Request) -> Response:
        body = parse(MessagesBody, await read_json(request))
        target = context.target(body.model)
        with renamed_faults(RENAMED):
            turn = await _turn(target, chat_body(body), "msg_" + request.scope[request_id.SCOPE_KEY])
            outputs = await submitted(context, request, target, [turn.input()], bool(body.stream))
        if body.stream:
            return EventStream(_frames(turn, outputs), context.admission, error_event)
        return await _whole_reply(context, request, turn, outputs)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = parse(CountTokensBody, await read_json(request))
        target = context.target(body.model)
        with renamed_faults(RENAMED):
            chat = chat_body(body)
            tools = read_tools(chat.tools, chat.tool_choice, None)
            prompt = await encode_messages(target.master, chat, tools)
        return _json({"input_tokens": len(prompt.token_ids)})

    return router


async def _turn(target: Target, chat: ChatBody, id: str) -> ChatTurn:
    """Clients of this API send a budget to every model: where it cannot be held to it is of no effect."""
    if not target.master.output_format.bounds_reasoning:
        chat.thinking_token_budget = None
    try:
        return await chat_turn(target, chat, id)
    except InvalidParameter as error:
        if error.param != BUDGET:
            raise
    chat.thinking_token_budget = None  # the model's tokenizer, say, is of a kind that grammars do not work with
    return await chat_turn(target, chat, id)


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _whole_reply(context: ApiContext, request: Request, turn: ChatTurn, outputs: Outputs) -> Response:
    count, sequence, content = UsageCount(1), turn.sequence(), MessageBlocks()

    def take(index: int, output: RequestOutput) -> None:
        count.update(index, output)
        for delta in output.deltas:
            for event in sequence.push(delta):
                content.push(event)

    await collect(request, context.admission, outputs, take)
    end = messages_events.ending(sequence.finish_reason, sequence.stop_reason)
    return _json(messages_events.message(turn.id, turn.target.name, content.blocks, end,
                                         messages_events.usage(count)))


async def _frames(turn: ChatTurn, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    count, sequence, content = UsageCount(1), turn.sequence(), MessageBlocks()
    begun = False
    try:
        async for index, output in outputs:
            count.update(index, output)
            events: list[dict[str, Any]] = []
            if not begun:
                begun = True
                start = messages_events.message(turn.id, turn.target.name, [], NOT_ENDED, messages_events.usage(count))
                events += [{"type": "message_start", "message": start}, {"type": "ping"}]
            for delta in output.deltas:
                for event in sequence.push(delta):
                    events += content.push(event)
            if events:
                yield b"".join(map(frame, events))
        end = messages_events.ending(sequence.finish_reason, sequence.stop_reason)
        events = [*content.close(), {"type": "message_delta", "delta": end, "usage": messages_events.usage(count)},
                  {"type": "message_stop"}]
        yield b"".join(map(frame, events))
    finally:
        await outputs.aclose()


