"""`python -m xllm_npu.service.api_table`: docs/api.md, made of the routes and bodies themselves.

A field is supported if a body declares it, ignored or refused if the lists beside the bodies say so. Whatever adds a
route or a field runs `make api-docs`; a test says when that was forgotten.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from xllm_npu.config.settings import Settings
from xllm_npu.master.model_set import ModelSet
from xllm_npu.service.admin import AdminRoutes
from xllm_npu.service.app import coordinator, create_app
from xllm_npu.service.console import STATE_PATH
from xllm_npu.service.openapi import BODIES
from xllm_npu.service.protocol import GUIDED, IGNORED, Body, GenerationBody
from xllm_npu.service.unsupported import UNSUPPORTED

HEAD = """# The HTTP API

Made from the code by `make api-docs`. What fields mean: [requests.md](requests.md). Every field may be null, which
means its default; a wrong value is answered with 400 and the field's name in `param`; fields that nobody knows are
ignored, and named in the response's header `X-Ignored-Fields`.
"""
# Of routes whose function says nothing.
PURPOSES = {
    "/v1/chat/completions": "OpenAI's chat completions.",
    "/v1/completions": "OpenAI's completions.",
    "/v1/messages": "Anthropic's messages.",
    "/v1/messages/count_tokens": "How many tokens they are.",
    "/v1/responses": "OpenAI's responses.",
    "/v1/responses/{id}": "One that was stored.",
    "/v1/responses/{id}/cancel": "Refused: none run in the background.",
    "/v1/responses/{id}/input_items": "What it was asked.",
}
CONSOLE = (("GET", "/", "The web console."), ("GET", STATE_PATH, "The figures of its live page."))


def document() -> str:
    settings = Settings()
    models = ModelSet.of_settings([settings])
    app = create_app(models, settings)
    described = app.openapi()["paths"]
    api = sorted([*_routes(described), *CONSOLE], key=lambda route: (route[1], route[0]))
    admin = AdminRoutes(models, coordinator(models, settings.service))
    operator = sorted((method, path, _first_sentence(inspect.getdoc(handler) or ""))
                      for method, handlers in (("POST", admin.posts()), ("GET", admin.gets()))
                      for path, handler in handlers.items())
    parts = [HEAD, "## Routes\n", _table(("Method", "Path", ""), api), "## Routes of the admin listener\n",
             "Only with `--admin-port`, and on that port alone.\n", _table(("Method", "Path", ""), operator)]
    for path, kinds in BODIES.items():
        for kind in kinds:
            title = f"`{path}`" + (f" with `{_own_field(kind, kinds)}`" if len(kinds) > 1 else "")
            parts += [f"## Fields of {title}\n", _table(("Field", "Type", ""), list(_fields(kind)))]
    return "\n".join(parts)


def _routes(paths: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            text = operation.get("description") or PURPOSES.get(path, "")
            yield method.upper(), path, _first_sentence(text)


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "." if text else ""


def _own_field(kind: type[Body], kinds: tuple[type[Body], ...]) -> str:
    """What tells this body from the others of its path."""
    others = {name for other in kinds if other is not kind for name in other.model_fields}
    return next(name for name, field in kind.model_fields.items() if name not in others and field.is_required())


def _fields(kind: type[Body]) -> Iterator[tuple[str, str, str]]:
    schema = kind.model_json_schema()
    for name, field in sorted(kind.model_fields.items()):
        text = _type_text(schema["properties"][name], schema.get("$defs", {}))
        yield f"`{name}`", text, "required" if field.is_required() else "supported"
    if issubclass(kind, GenerationBody):
        known = kind.model_fields.keys()
        for name in sorted((IGNORED | GUIDED) - known):
            yield f"`{name}`", "any", "ignored"
        for name in sorted(UNSUPPORTED.keys() - known):
            yield f"`{name}`", "any", "refused, unless it asks for nothing"


def _type_text(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema["enum"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "anyOf" in schema or "oneOf" in schema:
        options = [_type_text(option, definitions) for option in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(option for option in options if option != "null"))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type_text(schema.get('items', {}), definitions)}"
    if kind == "object" and schema.get("properties"):
        return "object: " + ", ".join(schema["properties"])
    return str(kind) + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high < 2**31 - 1:
        return f" {low} to {high}" if low is not None else f" up to {high}"
    if low is not None and low > -(2**31):
        return f" from {low}"
    return f", up to {schema['maxLength']} characters" if "maxLength" in schema else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(document())
