"""gpt-oss: messages with a header and a body, each on a channel (the Harmony format).

    <|channel|>analysis<|message|>They want the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>                      (without line breaks)

The channel `analysis` is reasoning, every other one the answer; a message to `functions.NAME` is a call, on whatever
channel, and the recipient may stand before the channel. Messages to other recipients, such as built-in tools that
were not offered, are dropped. The prompt ends within the first header. `<|call|>` and `<|return|>` end a sequence and
are not in its text.
"""

from __future__ import annotations

import re

from xllm_npu.text.call_grammar import CallGrammar, Expression
from xllm_npu.text.envelope import Envelope
from xllm_npu.text.free_text import Barred
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import END as END_OF_TEXT
from xllm_npu.text.output_reader import EndOfText, Ends, Markers, Steps
from xllm_npu.text.tool_calls.call_object import read_arguments
from xllm_npu.text.tool_spec import ToolSpec

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)

# The model writes these words in the text of a message too; at its end nothing but another message follows.
_BODY_ENDS = Ends(dict.fromkeys(ENDS, ((START, CHANNEL, END_OF_TEXT), False)), counts_when_cut=True)
_HEADER_ENDS = Markers((MESSAGE, START, *ENDS))
_HEADER_BEGINS = (CHANNEL, " to=", "to=", START, "assistant", MESSAGE, CONSTRAIN, *ENDS)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"[a-z]+")
_MARKUP = re.compile("|".join(map(re.escape, (START, CHANNEL, CONSTRAIN))) + "|^assistant")
_TAIL = 1024


class Harmony(Envelope):
    name = "gpt_oss"
    other_markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END)
    opener = trigger = f"{CHANNEL}commentary to=functions."
    takes_several = False  # <|call|> ends the turn

    def read_all(self, parse: Parse, with_reasoning: bool, prompt: str) -> Steps[None]:
        reader = parse.reader
        begun = prompt[-_TAIL:].rpartition(START)[2] if START in prompt[-_TAIL:] else ""
        header: str | None
        header, in_body, _ = begun.partition(MESSAGE)
        if not in_body and (yield from reader.peek(_HEADER_BEGINS)) is None:
            in_body = MESSAGE  # a model that keeps to no format
        while True:
            if not in_body:
                header = yield from self._read_header(parse, header or "")
            if header is not None:
                yield from self._read_body(parse, header, with_reasoning)
            header, in_body = "", ""
            yield from reader.space()
            yield from reader.accept(START)

    def grammar_before(self, grammar: CallGrammar, prompt: str, for_call: bool, budget: int | None = None,
                       ) -> Expression | None:
        """An analysis message, or none; an answer needs the header of its own."""
        if _in_body(prompt) or (budget == 0 and for_call):
            return None
        final = "" if for_call else f"{CHANNEL}final{MESSAGE}"
        if budget == 0:
            return grammar.literal(final)
        analysis = grammar.sequence(f"{CHANNEL}analysis{MESSAGE}",
                                    grammar.text_up_to(f"{END}{START}assistant", most=budget))
        return grammar.sequence(grammar.optional(analysis), final)

    def barred_reasoning(self, grammar: CallGrammar) -> Barred:
        return Barred(after={CHANNEL: (f"/\\s*/ {grammar.terminal('analysis')}",)})

    def barred_calls(self, grammar: CallGrammar, prompt: str) -> Barred:
        """Recipients, which stand before the channel or after it."""
        recipient = f"/(?s:.*)/ {grammar.terminal('to=')}"
        first = () if _in_body(prompt) else (recipient,)
        return Barred(first=first, after=dict.fromkeys((START, CHANNEL), (recipient,)))

    def _read_header(self, parse: Parse, begun: str) -> Steps[str | None]:
        """The header that a body follows; of another one the text is content."""
        reader = parse.reader
        parts = [begun]
        try:
            marker = yield from reader.until(_HEADER_ENDS, parts.append)
        except EndOfText:
            if not reader.cut_short:
                parse.events.content(_words(parts))
            raise
        if marker == MESSAGE:
            return "".join(parts)
        parse.events.content(_words(parts))
        return None

    def _read_body(self, parse: Parse, header: str, with_reasoning: bool) -> Steps[None]:
        events = parse.events
        before, _, after = header.rpartition(CHANNEL)
        found = _RECIPIENT.search(after) or _RECIPIENT.search(before)
        recipient = found[1] if found else ""
        channel = _CHANNEL.match(after.strip())
        if parse.tools and (recipient.startswith("functions.") or recipient in parse.tools):
            name = recipient.removeprefix("functions.")
            if (yield from parse.attempt(self._read_call(parse, name), "", events.content)):
                yield from parse.reader.stream(_BODY_ENDS, _drop)
                return
        elif recipient not in ("", "assistant", "user", "all") and parse.tools:
            yield from parse.reader.stream(_BODY_ENDS, _drop)
            return
        elif channel is not None and channel[0] == "analysis" and with_reasoning:
            events.begin_reasoning()
            yield from parse.reader.stream(_BODY_ENDS, events.reasoning)
            events.end_reasoning()
            return
        yield from parse.reader.stream(_BODY_ENDS, events.content)

    def _read_call(self, parse: Parse, name: str) -> Steps[None]:
        reader = parse.reader
        yield from reader.space()
        arguments = "{}"
        if (yield from reader.peek(ENDS)) not in (*ENDS, END_OF_TEXT):
            arguments = yield from read_arguments(reader)
        elif reader.cut_short:
            raise EndOfText
        parse.call(name, arguments)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(f"{tool.name} {CONSTRAIN}json{MESSAGE}",
                                grammar.arguments(tool))


def _in_body(prompt: str) -> bool:
    """Whether the prompt has begun the text of a message."""
    return MESSAGE in prompt[-_TAIL:].rpartition(START)[2]


def _words(header: list[str]) -> str:
    """A broken header without its markers, and the channel's name."""
    text = _MARKUP.sub("", "".join(header)).strip()
    return re.sub(r"^(analysis|commentary|final)\b", "", text).strip()


def _drop(_: str) -> None:
    pass
