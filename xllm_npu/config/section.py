"""The base of every group of settings: frozen, closed, and strict about what a number is."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """One group. Its docstring is the heading that `--help` prints; field descriptions are the help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError(f"takes a number, got {str(value).lower()}")
        # An empty string is how a shell or a launch file says "not set".
        return None if value == "" and type(None) in get_args(annotation) else value
