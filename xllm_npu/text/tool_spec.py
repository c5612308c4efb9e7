"""A tool that a request offers to the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """`parameters` is the JSON Schema of the arguments object; `strict`: calls must follow it."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False
