"""/v1/responses: OpenAI's Responses API over the same turns as chat; what is kept of them lies in a bounded store."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from xllm_npu.service.body import read_json
from xllm_npu.service.chat_turn import ChatTurn, SequenceEvents, chat_turn
from xllm_npu.service.context import ApiContext, Target
from xllm_npu.service.errors import ApiError, quote, renamed_faults
from xllm_npu.service.generation import Outputs, UsageCount, collect, submitted
from xllm_npu.service.logprobs import chat_logprobs
from xllm_npu.service.protocol import parse
from xllm_npu.service.response_store import ResponseStore, StoredResponse
from xllm_npu.service.responses_events import EventFrames, ResponseOutput, StreamEvent, new_id, output_messages
from xllm_npu.service.responses_request import (
    RENAMED,
    ResponsesBody,
    chat_body,
    input_items,
    input_messages,
    refuse_unavailable,
)
from xllm_npu.service.sse import EventStream
from xllm_npu.service.token_events import TokenEvents
from xllm_npu.state.output import RequestOutput
from xllm_npu.state.sampling_params import InvalidParameter

FAILED = {"code": "server_error"}


@dataclass(slots=True)
class ResponseCall:
    """One request, checked, and the response as it grows."""

    id: str
    body: ResponsesBody
    turn: ChatTurn
    earlier: list[dict[str, Any]]  # messages of the responses before it
    stored: bool
    sequence: SequenceEvents
    tokens: TokenEvents | None  # where log probabilities are asked for
    output: ResponseOutput = field(default_factory=ResponseOutput)
    count: UsageCount = field(default_factory=lambda: UsageCount(1))

    def take(self, index: int, output: RequestOutput) -> list[StreamEvent]:
        self.count.update(index, output)
        events: list[StreamEvent] = []
        for delta in output.deltas:
            if self.tokens is None:
                for event in self.sequence.push(delta):
                    events += self.output.push(event)
            else:
                for event, logprobs in self.tokens.push(delta):
                    events += self.output.push(event, chat_logprobs(logprobs).content)
        return events

    @property
    def status(self) -> str:
        """Once the sequence has ended."""
        reasons = {"length": "incomplete", "abort": "failed", "error": "failed"}
        return reasons.get(self.sequence.finish_reason or "abort", "completed")

    def response(self, status: str, usage: dict[str, Any] | None = None,
                 error: dict[str, Any] | None = None) -> dict[str, Any]:
        body, params = self.body, self.turn.params
        if status == "failed" and error is None:
            error = {**FAILED, "message": "The response was ended before it was complete."}
        return {
            "id": self.id, "object": "response", "created_at": self.turn.created, "status": status,
            "background": False, "completed_at": int(time.time()) if status == "completed" else None, "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls, "metadata": body.metadata or {}, "model": self.turn.target.name,
            "output": self.output.items, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})}, "store": self.stored,
            "temperature": params.temperature, "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0, "top_p": params.top_p,
            "truncation": body.truncation or "disabled", "usage": usage}

    async def ended(self) -> dict[str, Any]:
        """The response after its last event."""
        return self.response(self.status, await self._usage())

    async def _usage(self) -> dict[str, Any]:
        usage = self.count.usage()
        reasoning = await self.sequence.count_reasoning_tokens()
        return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
                "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens,
                                         "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": min(reasoning, usage.completion_tokens)}}

    def entry(self, body: bytes) -> StoredResponse:
        messages = [*self.earlier, *input_messages(self.body.input), *output_messages(self.output.items)]
        items = input_items(self.body.input)
        return StoredResponse(body, messages, items, len(body) + len(msgspec.json.encode([messages, items])))


def responses_router(context: ApiContext, store: ResponseStore) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def create(request: Request) -> Response:
        raw = await read_json(request)
        body = parse(ResponsesBody, raw)
        refuse_unavailable(body, raw)
        target = context.target(body.model)
        with renamed_faults(RENAMED):
            call = await _read_call(target, body, store)
            outputs = await submitted(context, request, target, [call.turn.input()], bool(body.stream))
        if body.stream:
            frames = EventFrames()
            return EventStream(_frames(call, frames, outputs, store), context.admission,
                               lambda error: _failed(call, frames, error))
        await collect(request, context.admission, outputs, call.take)
        call.output.close(_item_status(call.status))
        return _json(_kept(call, await call.ended(), store))

    @router.get("/v1/responses/{id}")
    async def retrieve(id: str, stream: bool = False) -> Response:
        if stream:
            raise InvalidParameter("stream", "stream: a response that is kept cannot be streamed again.")
        return _json(_stored(store, id).body)

    @router.get("/v1/responses/{id}/input_items")
    async def list_input_items(id: str) -> Response:
        items = [{"id": f"{id}_{i}", **item} for i, item in enumerate(_stored(store, id).input)]
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return _json(msgspec.json.encode({"object": "list", "data": items, "first_id": first, "last_id": last,
                                          "has_more": False}))

    @router.delete("/v1/responses/{id}")
    async def delete(id: str) -> Response:
        _stored(store, id)
        store.remove(id)
        return _json(msgspec.json.encode({"id": id, "object": "response", "deleted": True}))

    @router.post("/v1/responses/{id}/cancel")
    async def cancel(id: str) -> Response:
        _stored(store, id)
        raise ApiError(400, "Only a response in the background can be cancelled, and there are none: a client ends a "
                       "response by closing its connection.", param="response_id")

    return router


async def _read_call(target: Target, body: ResponsesBody, store: ResponseStore) -> ResponseCall:
    earlier = _earlier(body.previous_response_id, store)
    id = new_id("resp")
    turn = await chat_turn(target, chat_body(body, earlier), id)
    sequence = turn.sequence()
    return ResponseCall(id, body, turn, earlier, store.enabled and body.store is not False, sequence,
                        TokenEvents(sequence) if turn.params.logprobs is not None else None)


def _earlier(id: str | None, store: ResponseStore) -> list[dict[str, Any]]:
    name = "previous_response_id"
    if id is None:
        return []
    if not store.enabled:
        raise InvalidParameter(name, f"{name}: this server keeps no responses (--responses-store-size); send the "
                               "conversation as input.")
    entry = store.get(id)
    if entry is None:
        raise ApiError(404, f"{name}: no response {quote(id)} is kept; it was not stored, or has been dropped.",
                       param=name, code="previous_response_not_found")
    return entry.messages


def _stored(store: ResponseStore, id: str) -> StoredResponse:
    entry = store.get(id)
    if entry is None:
        hint = "" if store.enabled else " This server keeps no responses (--responses-store-size)."
        raise ApiError(404, f"No response {quote(id)} is kept.{hint}", param="response_id", code="not_found")
    return entry


def _kept(call: ResponseCall, response: dict[str, Any], store: ResponseStore) -> bytes:
    """The response's bytes; the store has it too, if it is to be kept."""
    body = msgspec.json.encode(response)
    if call.stored and response["status"] != "failed":
        store.put(call.id, call.entry(body))
    return body


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _item_status(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


async def _frames(call: ResponseCall, frames: EventFrames, outputs: Outputs,
                  store: ResponseStore) -> AsyncGenerator[bytes, None]:
    try:
        begun = call.response("in_progress")
        yield b"".join(frames.frame({"type": type, "response": begun})
                       for type in ("response.created", "response.in_progress"))
        async for index, output in outputs:
            events = call.take(index, output)
            if events:
                yield b"".join(map(frames.frame, events))
        events = call.output.close(_item_status(call.status))
        response = await call.ended()
        _kept(call, response, store)
        events.append({"type": f"response.{call.status}", "response": response})
        yield b"".join(map(frames.frame, events))
    finally:
        await outputs.aclose()


def _failed(call: ResponseCall, frames: EventFrames, error: ApiError) -> bytes:
    response = call.response("failed", error={**FAILED, "message": error.message})
    return frames.frame({"type": "response.failed", "response": response})
