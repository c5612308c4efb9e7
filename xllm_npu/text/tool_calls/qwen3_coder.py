"""Qwen3-Coder, and Qwen from 3.5 on: bare values in tags with the names in them.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

One line break on each side of a value is markup. The types are the schema's. The outer tags, or the end of a
parameter, are sometimes forgotten.
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
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"

_NAME_END = Markers((">", "\n"))
_VALUE_ENDS = Ends({
    PARAMETER_END: ((PARAMETER, FUNCTION_END, END), False),
    PARAMETER: ((), True),
    FUNCTION_END: ((END, END_OF_TEXT), False),
})


class Qwen3Coder(ToolCallFormat):
    name = "qwen3_coder"
    openers = (START, FUNCTION)
    other_markers = (END,)
    trims = True
    opener = trigger = START
    separator = "\n"
    json_arguments = False

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        reader = parse.reader
        if opener == START:
            yield from reader.space()
            yield from reader.expect(FUNCTION)
        name, _ = yield from reader.text_until(_NAME_END)
        pairs: list[tuple[str, str]] = []
        yield from reader.space()
        marker = yield from reader.expect(PARAMETER, FUNCTION_END)
        while marker == PARAMETER:
            key, _ = yield from reader.text_until(_NAME_END)
            value, marker = yield from reader.value(_VALUE_ENDS)
            pairs.append((key.strip(), value.removeprefix("\n").removesuffix("\n")))
            if marker == PARAMETER_END:
                marker = yield from reader.expect(PARAMETER, FUNCTION_END, END)
        name = name.strip()
        tool = parse.tools.get(name)
        parse.call(name, arguments_object(pairs, tool.parameters if tool is not None else {}))
        if marker != END:
            yield from reader.space()
            yield from reader.accept_end(END)

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(
            f"\n{FUNCTION}{tool.name}>\n",
            grammar.bare_arguments(tool, lambda key, _: (f"{PARAMETER}{key}>\n", f"\n{PARAMETER_END}\n")),
            f"{FUNCTION_END}\n{END}")
