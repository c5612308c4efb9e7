"""One turn of a chat, whichever API asked for it: from the request to a prompt, and from the tokens' text to events.

/v1/messages and /v1/responses bring their requests into the form of /v1/chat/completions (`ChatBody`), so that all
three share this way. A turn knows no HTTP and no reply format. Streamed or not, every choice's text goes through one
`SequenceEvents`; what differs is only how much text comes at once.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace

from xllm_npu.master.request_factory import GenerationInput
from xllm_npu.service.chat_prompt import encode_messages
from xllm_npu.service.context import Target
from xllm_npu.service.generation import generation_input, truncated
from xllm_npu.service.protocol import ChatBody
from xllm_npu.service.sampling import sampling_params
from xllm_npu.service.tools import Tools, read_tools
from xllm_npu.service.turn_grammar import turn_grammar
from xllm_npu.state.output import SequenceDelta
from xllm_npu.state.sampling_params import MAX_LOGPROBS, InvalidParameter, SamplingParams
from xllm_npu.text.output_events import Content, Event, Reasoning, ToolCall
from xllm_npu.text.output_format import OutputFormat

ENDED_BY_ITSELF = "stop"
CALLED_TOOLS = "tool_calls"


@dataclass(slots=True)
class ChatTurn:
    """One request, checked, its prompt made."""

    body: ChatBody
    id: str
    target: Target
    created: int
    params: SamplingParams
    tools: Tools
    prompt_text: str  # before truncation
    prompt_token_ids: list[int]

    @property
    def format(self) -> OutputFormat:
        return self.target.master.output_format

    @property
    def has_reasoning(self) -> bool:
        return self.format.name_of_reasoning is not None

    def input(self) -> GenerationInput:
        return generation_input(self.body, self.id, self.prompt_token_ids, self.params, "messages")

    def sequence(self) -> SequenceEvents:
        """For each of the turn's choices one."""
        return SequenceEvents(self)


async def chat_turn(target: Target, body: ChatBody, id: str) -> ChatTurn:
    """Raises InvalidParameter; whatever needs no prompt is checked before one is made."""
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    params = sampling_params(body, target.master.default_sampling, max_tokens=_max_tokens(body),
                             logprobs=_logprobs(body))
    format = target.master.output_format
    if tools.callable and format.name_of_tools is None:
        raise InvalidParameter("tools", "tools are refused: this server reads no calls (--tool-call-parser none).")
    if format.name_of_reasoning is not None or tools.callable:
        params = replace(params, shown_special_tokens=tuple(sorted(format.shown_special_tokens)))
    prompt = await encode_messages(target.master, body, tools)
    longest = min(params.max_tokens or target.info.max_model_len, target.info.max_model_len)
    params = replace(params, grammar=await turn_grammar(target.master, body, tools, prompt.text, longest))
    token_ids = truncated(prompt.token_ids, body, params.max_tokens, target.info)
    return ChatTurn(body, id, target, int(time.time()), params, tools, prompt.text, token_ids)


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


class SequenceEvents:
    """One choice: what its text says, delta by delta, and how it ended."""

    def __init__(self, turn: ChatTurn) -> None:
        self._turn = turn
        self._parser = turn.format.parser(turn.tools.callable, turn.prompt_text)
        self._reasoning: list[str] = []
        self._num_calls = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def push(self, delta: SequenceDelta) -> list[Event]:
        """The events of one delta, every call with an id; with the last delta `finish_reason` is set."""
        events = self._parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            at_stop_string = isinstance(delta.stop_reason, str)  # which may stand in the middle of markup
            events += self._parser.finish(cut_short=delta.finish_reason != ENDED_BY_ITSELF or at_stop_string)
        shown = [event for event in map(self._shown, events) if event is not None]
        if delta.finish_reason is not None:
            called = self._num_calls and delta.finish_reason == ENDED_BY_ITSELF
            self.finish_reason = CALLED_TOOLS if called else delta.finish_reason
            self.stop_reason = delta.stop_reason
        return shown

    def is_content(self, offset: int) -> bool | None:
        """Whether the character at `offset` of the choice's text is of its answer; None where that is not known yet."""
        return self._parser.is_content(offset)

    def _shown(self, event: Event) -> Event | None:
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return None if self._turn.body.include_reasoning is False else event
        if isinstance(event, ToolCall):
            if self._num_calls and not self._turn.tools.parallel:
                return None
            index, self._num_calls = self._num_calls, self._num_calls + 1
            return replace(event, index=index, id=event.id or new_call_id(self._turn.format))
        # What is no call where nothing else can be is the white space between calls, or half of one.
        return None if self._turn.tools.forced else event

    async def count_reasoning_tokens(self) -> int:
        """By the text: a token that ends the reasoning and begins the answer counts for neither alone."""
        text = "".join(self._reasoning)
        count = len(await self._turn.target.master.text.encode(text, False)) if text else 0
        budget = self._turn.body.thinking_token_budget
        # A model may write a text in fewer tokens than its tokenizer does, or in half characters.
        return count if budget is None or budget < 0 else min(count, budget)


def new_call_id(format: OutputFormat) -> str:
    if (format.name_of_tools or "").startswith("mistral"):
        return uuid.uuid4().hex[:9]  # their templates refuse other lengths when the call comes back
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class WholeAnswer:
    """What one choice said, for replies that are sent whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
        else:
            self.calls.append(event)
