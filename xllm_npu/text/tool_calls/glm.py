"""GLM 4.5 and 4.6, with line breaks, and from 4.7 on without: keys and bare values in tags. Both are read alike.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>

Strings are bare and every other value is JSON, so the tool's schema decides. White space in a value belongs to it.
"""

from __future__ import annotations

from xllm_npu.text.argument_types import arguments_object
from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import END as END_OF_TEXT
from xllm_npu.text.output_reader import Ends, Markers, Steps
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_spec import ToolSpec

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

_AFTER_NAME = Markers(("\n", KEY, END))
_AFTER_KEY = Markers((KEY_END,))
# The last value's own end is sometimes forgotten.
_VALUE_ENDS = Ends({VALUE_END: ((KEY, END), False), END: ((START, END_OF_TEXT), False)})


class Glm47(ToolCallFormat):
    name = "glm47"
    openers = (START,)
    other_markers = (END, KEY, KEY_END, VALUE, VALUE_END)
    trims = True
    opener = trigger = START
    json_arguments = False
    line_break = ""

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        reader = parse.reader
        name, marker = yield from reader.text_until(_AFTER_NAME)
        name = name.strip()
        pairs: list[tuple[str, str]] = []
        while marker != END:
            if marker != KEY:
                yield from reader.space()
                marker = yield from reader.expect(KEY, END)
                continue
            key, _ = yield from reader.text_until(_AFTER_KEY)
            yield from reader.space()
            yield from reader.expect(VALUE)
            value, marker = yield from reader.value(_VALUE_ENDS)
            pairs.append((key.strip(), value))
        tool = parse.tools.get(name)
        parse.call(name, arguments_object(pairs, tool.parameters if tool is not None else {}))

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        n = self.line_break
        return grammar.sequence(
            f"{tool.name}{n}",
            grammar.bare_arguments(tool, lambda key, _: (f"{KEY}{key}{KEY_END}{n}{VALUE}", f"{VALUE_END}{n}")),
            END)


class Glm45(Glm47):
    name = "glm45"
    line_break = separator = "\n"
