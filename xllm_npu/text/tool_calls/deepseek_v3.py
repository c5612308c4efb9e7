"""DeepSeek V3 and R1, and V3.1: a section of calls with JSON arguments, which the older ones put into a code fence.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                                                                  (V3, R1)

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>                                                       (V3.1, without the line break)
"""

from __future__ import annotations

from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Markers, NotMarkup, Steps
from xllm_npu.text.tool_calls.call_object import read_arguments
from xllm_npu.text.tool_calls.call_section import CallsInSection
from xllm_npu.text.tool_spec import ToolSpec

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"

_AFTER_NAME = Markers((SEPARATOR, CALL_END, END))
_LINE = Markers(("\n",))


class DeepSeekV31(CallsInSection):
    name = "deepseek_v31"
    openers = (BEGIN, CALL)
    other_markers = (END, SEPARATOR, CALL_END)
    trigger = BEGIN
    section = (BEGIN, END)

    def _read_call(self, parse: Parse) -> Steps[None]:
        reader = parse.reader
        name, marker = yield from reader.text_until(_AFTER_NAME)
        if marker != SEPARATOR:
            raise NotMarkup
        arguments = yield from read_arguments(reader)
        yield from reader.space()
        yield from reader.expect(CALL_END)
        parse.call(name.strip(), arguments)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(CALL + tool.name + SEPARATOR, grammar.arguments(tool), CALL_END)


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"
    separator = "\n"

    def _read_call(self, parse: Parse) -> Steps[None]:
        reader = parse.reader
        kind, marker = yield from reader.text_until(_AFTER_NAME)
        if marker != SEPARATOR or kind.strip() != "function":
            raise NotMarkup
        name, _ = yield from reader.text_until(_LINE)
        yield from reader.space()
        yield from reader.expect(FENCE)
        yield from reader.accept("json")
        arguments = yield from read_arguments(reader)
        yield from reader.space()
        yield from reader.expect(FENCE)
        yield from reader.space()
        yield from reader.expect(CALL_END)
        parse.call(name.strip(), arguments)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(f"{CALL}function{SEPARATOR}{tool.name}\n{FENCE}json\n", grammar.arguments(tool),
                                f"\n{FENCE}{CALL_END}")
