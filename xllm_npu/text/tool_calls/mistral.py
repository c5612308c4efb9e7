"""Mistral's models, in the forms of their tokenizers' versions.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]      (up to version 7)
    [TOOL_CALLS]get_weather[CALL_ID]0123abcde[ARGS]{"city": "Paris"}            (11; the id often lacks)
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}                              (13)
"""

from __future__ import annotations

from xllm_npu.text.call_grammar import CallGrammar
from xllm_npu.text.output_parser import Parse
from xllm_npu.text.output_reader import Markers, NotMarkup, Steps
from xllm_npu.text.tagged_output import ToolCallFormat
from xllm_npu.text.tool_calls.call_object import read_arguments, read_call_object
from xllm_npu.text.tool_spec import ToolSpec

START, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_AFTER_NAME = Markers((ID, ARGUMENTS, START, "{", "\n"))
_AFTER_ID = Markers((ARGUMENTS, START, "{", "\n"))


class Mistral(ToolCallFormat):
    name = "mistral"
    openers = (START,)
    other_markers: tuple[str, ...] = (ID, ARGUMENTS)
    opener = trigger = START

    def read(self, parse: Parse, opener: str) -> Steps[None]:
        reader = parse.reader
        yield from reader.space()
        if (yield from reader.accept("[")) is not None:
            yield from self._read_list(parse)
            return
        if (yield from reader.peek("{")) == "{":
            call = yield from read_call_object(reader)
            parse.call(*call)
            return
        name, marker = yield from reader.text_until(_AFTER_NAME)
        id = None
        if marker == ID:
            id, marker = yield from reader.text_until(_AFTER_ID)
        if marker not in (ARGUMENTS, "{"):
            raise NotMarkup
        arguments = yield from read_arguments(reader, "{" if marker == "{" else "")
        parse.call(name.strip(), arguments, id)

    def _read_list(self, parse: Parse) -> Steps[None]:
        reader = parse.reader
        while True:
            yield from reader.space()
            call = yield from read_call_object(reader)
            parse.call(*call)
            yield from reader.space()
            if (yield from reader.expect(",", "]")) == "]":
                return

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.sequence(tool.name + ARGUMENTS, grammar.arguments(tool))


class MistralList(Mistral):
    """The older form; both are read alike, but forced calls must have the one that the model knows."""

    name = "mistral_v3"
    opener = ""
    section = (START + " [", "]")
    separator = ", "

    def grammar_of_call(self, grammar: CallGrammar, tool: ToolSpec) -> str:
        return grammar.call_object(tool)
