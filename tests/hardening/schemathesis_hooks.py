"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): half of what it makes gets past the model's name and the prompt.

Left alone, nearly every body fails at `model` or in its messages, and no other field is ever looked at.
"""

from typing import Any

import schemathesis

PROMPTS: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello", "input": "Hello"}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict) or len(repr(body)) % 2:
        return body
    known = {name: good for name, good in PROMPTS.items() if name in body}
    if "batch" in context.operation.path:
        known = {"messages": [PROMPTS["messages"]]}
    return {**{name: value for name, value in body.items() if name != "model"}, **known}
