"""Which grammar a request asks for: OpenAI's `response_format` and vLLM's `structured_outputs`.

`request_grammar` makes the grammar, `check_grammar` has it tried out. A wrong value is an InvalidParameter that names
the field, down to `structured_outputs.regex`. Knows no tools and no reasoning: the chat API puts those around.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xllm_npu.service.errors import quote, unavailable
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text import structured_output
from xllm_npu.text.grammar_compiler import GrammarsBusy

if TYPE_CHECKING:
    from xllm_npu.master.llm_master import LLMMaster
    from xllm_npu.service.protocol import GenerationBody

MAX_WHITESPACE_CHARS = 100
COMPACT = ""  # whitespace of `disable_any_whitespace`
BUSY_RETRY_SECONDS = 5


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True, protected_namespaces=())


class JsonSchemaBody(_Part):
    name: str | None = None
    description: str | None = None
    json_schema: Any = Field(None, alias="schema")  # an object or a bool; a union would blur errors' paths
    strict: bool | None = None


class ResponseFormatBody(_Part):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaBody | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputsBody(_Part):
    """One of the first six."""

    json_: Any = Field(None, alias="json")  # a schema, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None  # an object, or its text
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is none


def request_grammar(body: GenerationBody, marker_ids: Mapping[str, int] | None = None) -> str | None:
    """None where the text is free. Raises InvalidParameter. `marker_ids`: the tokenizer's."""
    grammar = _of_format(body.response_format, marker_ids) if body.response_format is not None else None
    if body.structured_outputs is not None:
        other = _of_structured_outputs(body.structured_outputs, marker_ids)
        if grammar is not None and other is not None:
            raise InvalidParameter("structured_outputs", "structured_outputs and response_format both ask for a form "
                                   "of the output; give one of them.")
        grammar = other or grammar
    if grammar is not None and body.use_beam_search:
        name = grammar_field(body)
        raise InvalidParameter(name, f"{name} is not available with use_beam_search.")
    return grammar


async def requested_grammar(master: LLMMaster, body: GenerationBody) -> str | None:
    """`request_grammar`, off the event loop where rewriting what the client wrote may take long."""
    given, format = body.structured_outputs, body.response_format
    long = (given is not None and (given.grammar is not None or given.structural_tag is not None)) or (
        format is not None and format.type == "structural_tag")
    if long:
        return await asyncio.to_thread(request_grammar, body, master.tokenizer.marker_ids)
    return request_grammar(body, master.tokenizer.marker_ids)


def grammar_field(body: GenerationBody) -> str:
    """The field that `request_grammar` made its grammar of, for errors."""
    given = body.structured_outputs
    if given is not None and (kind := _kinds(given)):
        return f"structured_outputs.{kind[0]}"
    return "response_format"


async def check_grammar(master: LLMMaster, grammar: str, field: str) -> None:
    """Raise InvalidParameter for one that the engine could not use, ApiError if there is no telling now."""
    try:
        await master.grammars.check(grammar, field)
    except GrammarsBusy as error:
        raise unavailable(str(error), "grammars_busy", BUSY_RETRY_SECONDS) from None


async def checked_grammar(master: LLMMaster, body: GenerationBody) -> str | None:
    """`requested_grammar`, tried out."""
    grammar = await requested_grammar(master, body)
    if grammar is not None:
        await check_grammar(master, grammar, grammar_field(body))
    return grammar


def _of_format(format: ResponseFormatBody, marker_ids: Mapping[str, int] | None) -> str | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return structured_output.json_object()
    if format.type == "json_schema":
        if format.json_schema is None:
            raise InvalidParameter("response_format.json_schema", "response_format.json_schema is required.")
        schema = format.json_schema.json_schema
        return _of_schema("response_format.json_schema.schema", {"type": "object"} if schema is None else schema)
    given = {"type": format.type, "structures": format.structures, "triggers": format.triggers,
             "format": format.format}
    return _of_tag("response_format", {name: value for name, value in given.items() if value is not None}, marker_ids)


def _kinds(given: StructuredOutputsBody) -> list[str]:
    values = {"json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar,
              "json_object": given.json_object or None, "structural_tag": given.structural_tag}
    return [name for name, value in values.items() if value is not None]


def _of_structured_outputs(given: StructuredOutputsBody, marker_ids: Mapping[str, int] | None) -> str | None:
    kinds, name = _kinds(given), "structured_outputs"
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InvalidParameter(name, f"{name} takes one of json, regex, choice, grammar, json_object and "
                               f"structural_tag, got {' and '.join(kinds)}.")
    if given.disable_additional_properties:
        raise InvalidParameter(f"{name}.disable_additional_properties", f"{name}.disable_additional_properties is "
                               'not supported; write "additionalProperties": false into the schema.')
    whitespace = _whitespace(given)
    if given.regex is not None:
        return _made(f"{name}.regex", structured_output.regex, given.regex)
    if given.choice is not None:
        return _made(f"{name}.choice", structured_output.choice, given.choice)
    if given.grammar is not None:
        return _made(f"{name}.grammar", structured_output.lark, given.grammar)
    if given.structural_tag is not None:
        tag = _json_of(f"{name}.structural_tag", given.structural_tag)
        return _of_tag(f"{name}.structural_tag", tag, marker_ids)
    schema = {"type": "object"} if given.json_ is None else _json_of(f"{name}.json", given.json_)
    return _of_schema(f"{name}.json", schema, whitespace)


def _of_schema(field: str, schema: Any, whitespace: str = structured_output.WHITESPACE) -> str:
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(field, f"{field} must be a JSON schema, got {quote(schema)}.")
    return _made(field, lambda s: structured_output.json_schema(s, whitespace), schema)


def _of_tag(field: str, tag: Any, marker_ids: Mapping[str, int] | None) -> str:
    if not isinstance(tag, dict):
        raise InvalidParameter(field, f"{field} must be an object.")
    return _made(field, lambda t: structured_output.structural_tag(t, marker_ids), tag)


def _whitespace(given: StructuredOutputsBody) -> str:
    name = "structured_outputs.whitespace_pattern"
    if given.disable_any_whitespace:
        return COMPACT
    if given.whitespace_pattern is None:
        return structured_output.WHITESPACE
    if len(given.whitespace_pattern) > MAX_WHITESPACE_CHARS:
        raise InvalidParameter(name, f"{name} takes at most {MAX_WHITESPACE_CHARS} characters.")
    return given.whitespace_pattern


def _json_of(field: str, value: Any) -> Any:
    """vLLM's clients may send JSON as text."""
    if not isinstance(value, str):
        return value
    limit = structured_output.MAX_SCHEMA_CHARS
    if len(value) > limit:
        raise InvalidParameter(field, f"{field} takes at most {limit} characters, got {len(value)}.")
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidParameter(field, f"{field} is not valid JSON.") from None


def _made(field: str, make: Callable[[Any], str], value: Any) -> str:
    try:
        return make(value)
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidParameter(field, f"{field} {reason}.") from None
