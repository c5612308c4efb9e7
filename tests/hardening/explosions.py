"""Grammars and chat templates that are small to send and large to work on."""

from __future__ import annotations

from typing import Any

USER = {"role": "user", "content": "Hello"}


def _nested(kind: str, depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": "^(a|b)+$"}
    for level in range(depth):
        schema = {kind: [{"type": "object", "properties": {f"p{level}{i}": schema}} for i in range(width)]}
    return schema


REGEXES = (
    "(a{1,1000}){1,1000}", "((((a{1,99}){1,99}){1,99}){1,99})", "(x+x+)+y", "(?=a)b", r"(a)\1", "[^", "(", "*",
    "a" * 16385,
    ".*" * 2000, "(a|b|ab)*" * 500, r"[\u0000-\U0010ffff]{1,5000}", "(?i)" + "é" * 5000, "\\p{L}{1000}{1000}", "",
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    _nested("anyOf", 6, 4), _nested("oneOf", 5, 5), _nested("allOf", 5, 4),
    {"$ref": "#"}, {"$ref": "#/a/b/c"}, {"$ref": "https://169.254.169.254/schema"}, {"allOf": [{"$ref": "#"}] * 50},
    {"type": "array", "minItems": 10**6, "maxItems": 10**9, "items": {"type": "array", "minItems": 10**6}},
    {"type": "string", "minLength": 10**7, "maxLength": 10**9}, {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    {"enum": [f"value {i}" for i in range(5000)]}, {"enum": []}, {"type": "integer", "multipleOf": 1e-300},
    {"type": "integer", "minimum": 1, "maximum": 10**300}, {"type": "number", "minimum": 1.000000001, "maximum": 1e300},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
     "required": [f"p{i}" for i in range(2000)]},
    {"type": "object", "patternProperties": {"(a{1,1000}){1,1000}": {}}}, {"not": {"not": {}}}, False, True, [], "x", 5,
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": ["string"] * 5000}, {"x-guidance": {"coerce_one_of": "x"}}, {"x-guidance": 5},
)  # fmt: skip
GRAMMARS = (
    "start: start", "start: a a a a\na: b b b b\nb: c c c c\nc: d d d d\nd: /a{1,500}/",
    "start: (\"a\" | start start)*",
    "start: \"a\"{1,100000}", "start: /(/", "", "start:", "root ::= root root | \"a\"", "root ::= [^", "start: %json {",
    "start: %json {\"$ref\": \"#\"}", "start: <[99999999]>", "start: @unknown",
    "start: " + "(" * 3000 + "\"a\"" + ")" * 3000,
    "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), "r60: \"a\""]), "\0",
    "%ignore /.*/\nstart: \"a\"",
)  # fmt: skip
TAGS: tuple[Any, ...] = (
    {"type": "structural_tag", "structures": [], "triggers": []},
    {"type": "structural_tag", "triggers": ["<"] * 500, "structures": [{"begin": "<a>", "schema": {"$ref": "#"},
                                                                        "end": ""}]},
    {"type": "structural_tag", "format": {"type": "sequence", "elements": []}},
    {"type": "structural_tag", "format": {"type": "repeat", "min": 10**6, "max": 10**9,
                                          "content": {"type": "any_text"}}},
    {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a{1,1000}){1,1000}"}},
)  # fmt: skip
TEMPLATES = (
    "{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**10 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set x = [1] %}{% for i in range(60) %}{% set x = x + x %}{% endfor %}",
    "{{ 10**10**8 }}", "{{", "{% include '/etc/passwd' %}", "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception('no') }}",
    "{{ messages | map(attribute='__class__') | list }}", "a" * 65537, "{{ namespace().__dict__ }}",
    "{{ lipsum(n=10000) }}",
    "{{ strftime_now('%' * 10000) }}", "{{ tools | tojson(indent=10**6) }}", "\0", "{{ '%10000000s' % 'a' * 500 }}",
)  # fmt: skip


def cheap_requests() -> list[tuple[str, dict[str, Any]]]:
    """(route, body) of every one of them but the templates, whose processes take long to start."""
    outputs = [{"regex": regex} for regex in REGEXES]
    outputs += [{"json": schema} for schema in SCHEMAS]
    outputs += [{"grammar": grammar} for grammar in GRAMMARS]
    outputs += [{"choice": choice} for choice in ([], [""], ["a"] * 4097, ["a" * 70000],
                                                  [f"c{i}" for i in range(4096)])]
    outputs += [{"json": {}, "whitespace_pattern": pattern} for pattern in ("(a{99}){99}", "(", "x" * 101)]
    bodies = [("/v1/completions", {"prompt": "a", "max_tokens": 6, "structured_outputs": output}) for output in outputs]
    chats: list[dict[str, Any]] = [{"response_format": tag} for tag in TAGS]
    chats += [{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
              for schema in SCHEMAS]
    chats += [{"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
               "tool_choice": "required"}
              for schema in SCHEMAS]
    bodies += [("/v1/chat/completions", {"messages": [USER], "max_tokens": 6, **chat}) for chat in chats]
    bodies += [("/v1/messages", {"messages": [USER], "max_tokens": 6, "tool_choice": {"type": "any"},
                                 "tools": [{"name": "f", "input_schema": schema}]}) for schema in SCHEMAS]
    bodies += [("/v1/responses", {"input": "a", "max_output_tokens": 6, "text": {"format": {
        "type": "json_schema", "name": "n", "schema": schema}}}) for schema in SCHEMAS]
    return bodies


def template_requests() -> list[tuple[str, dict[str, Any]]]:
    return [(path, {"messages": [USER], "max_tokens": 4, "chat_template": template})
            for template in TEMPLATES for path in ("/v1/chat/completions", "/tokenize")]
