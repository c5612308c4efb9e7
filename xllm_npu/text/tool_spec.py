"""A tool that a request offers to the model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from xllm_npu.text.argument_types import properties_of, types_of


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """`parameters` is the JSON Schema of the arguments object; `strict`: calls must follow it."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False

    def loosened(self, any_json: bool) -> ToolSpec:
        """The same tool with no more of its schema than the parameters' names and types, or with `any_json` nothing."""
        if any_json:
            return replace(self, parameters={"type": "object"})
        properties: dict[str, Any] = {}
        for key, schema in properties_of(self.parameters).items():
            types = sorted(types_of(schema, self.parameters))
            properties[key] = {"type": types} if types else {}
        return replace(self, parameters={"type": "object", "properties": properties})
