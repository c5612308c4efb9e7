"""Kimi K3: elements of control tokens for reasoning, answer and calls (XTML).

    ...<|close|>think<|sep|><|open|>response<|sep|>One moment.<|close|>response<|sep|><|open|>tools<|sep|>
    <|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris
    <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>    (without line breaks)

The prompt opens `think` or `response`. Attributes have & and " escaped, bodies nothing; a body that is no string is
JSON.
"""

from __future__ import annotations

from xllm_npu.text.argument_types import json_or_string, object_text, properties_of, typed
from xllm_npu.text.call_grammar import CallGrammar, Expression
from xllm_npu.text.envelope import Envelope
from xllm_npu.text.free_text import Barred, barred
from xllm_npu.text.json_scanner import dumped
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import END as END_OF_TEXT
from xllm_npu.text.output_reader import Ends, Markers, Steps
from xllm_npu.text.tool_calls.call_section import read_section
from xllm_npu.text.tool_spec import ToolSpec

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
THINK, RESPONSE, TOOLS = (f"{OPEN}{name}{SEPARATOR}" for name in ("think", "response", "tools"))
THINK_END = f"{CLOSE}think{SEPARATOR}"
TOOLS_END, CALL_END, ARGUMENT_END = (f"{CLOSE}{name}{SEPARATOR}" for name in ("tools", "call", "argument"))
CALL, ARGUMENT = f'{OPEN}call tool="', f'{OPEN}argument key="'

_AFTER_ELEMENT = ((OPEN, CLOSE, END_OF_TEXT), False)
_THINK_ENDS = Ends({THINK_END: _AFTER_ELEMENT, RESPONSE: ((), False), TOOLS: ((), False)},
                   counts_when_cut=True)
_RESPONSE_ENDS = Ends({f"{CLOSE}response{SEPARATOR}": _AFTER_ELEMENT, TOOLS: ((), False)}, counts_when_cut=True)
_VALUE_ENDS = Ends({ARGUMENT_END: ((ARGUMENT, CALL_END), False)})
_BETWEEN = Markers((THINK, RESPONSE, TOOLS, f"{CLOSE}message{SEPARATOR}", f"{CLOSE}response{SEPARATOR}"))
_IN_TOOLS = Markers((CALL, TOOLS_END))
_QUOTE, _SEPARATOR = Markers(('"',)), Markers((SEPARATOR,))


class KimiK3(Envelope):
    name = "kimi_k3"
    other_markers = (OPEN, CLOSE, SEPARATOR)
    trigger = TOOLS
    section = (TOOLS, TOOLS_END)
    json_arguments = False

    def read_all(self, parse: Parse, with_reasoning: bool, prompt: str) -> Steps[None]:
        events, reader = parse.events, parse.reader
        tail = prompt.rstrip()
        element = next((one for one in (THINK, RESPONSE) if tail.endswith(one)), "")
        while True:
            if element == THINK:
                if with_reasoning:
                    events.begin_reasoning()
                element = yield from reader.stream(_THINK_ENDS, events.reasoning if with_reasoning else events.content)
                events.end_reasoning()
            elif element == RESPONSE:
                element = yield from reader.stream(_RESPONSE_ENDS, events.content)
            elif element == TOOLS and parse.tools:
                calls = read_section(parse, _IN_TOOLS, TOOLS_END, self._read_call)
                yield from parse.attempt(calls, TOOLS, events.content)
                element = ""
            else:
                if element == TOOLS:
                    events.content(TOOLS)
                element = yield from reader.until(_BETWEEN, events.content)

    def grammar_before(self, grammar: CallGrammar, prompt: str, for_call: bool, budget: int | None = None,
                       ) -> Expression | None:
        """A model that thinks in its prompt's element closes it; then comes an answer's, if it is to be one."""
        if not prompt.rstrip().endswith(THINK):
            return None
        return grammar.text_up_to(THINK_END + ("" if for_call else RESPONSE), most=budget)

    def barred_reasoning(self, grammar: CallGrammar) -> Barred:
        return barred(grammar, THINK)

    def _read_call(self, parse: Parse) -> Steps[None]:
        reader = parse.reader
        quoted, _ = yield from reader.text_until(_QUOTE)
        name = _unescaped(quoted)
        yield from reader.text_until(_SEPARATOR)
        tool = parse.tools.get(name)
        schema = tool.parameters if tool is not None else {}
        pairs: list[tuple[str, str]] = []
        while (yield from reader.expect(ARGUMENT, CALL_END)) == ARGUMENT:
            quoted, _ = yield from reader.text_until(_QUOTE)
            key = _unescaped(quoted)
            attributes, _ = yield from reader.text_until(_SEPARATOR)
            value, _ = yield from reader.value(_VALUE_ENDS)
            if 'type="string"' in attributes:
                pairs.append((key, dumped(value)))
            elif "type=" in attributes:
                pairs.append((key, json_or_string(value)))
            else:
                pairs.append((key, typed(value, properties_of(schema).get(key), schema)))
        parse.call(name, object_text(pairs))

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(
            f'{CALL}{_escaped(tool.name)}" index="', grammar.regex("[1-9][0-9]?"), f'"{SEPARATOR}',
            grammar.bare_arguments(tool, lambda key, kind: (
                f'{ARGUMENT}{_escaped(key)}" type="{kind}"{SEPARATOR}', ARGUMENT_END)),
            CALL_END)


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
