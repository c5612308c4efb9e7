"""pydantic's findings as sentences: the spelling the user gave, the value, and what would be accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from xllm_npu.config.names import Given, flag

_KINDS = {
    "int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number",
    "int_parsing_size": "a whole number", "float_parsing": "a number", "float_type": "a number",
    "finite_number": "a finite number", "bool_parsing": "true or false", "bool_type": "true or false",
    "string_type": "text", "string_too_short": "a value that is not empty", "tuple_type": "a list",
    "missing": "a value",
}  # fmt: skip


def explain(error: ValidationError, fields: Mapping[str, FieldInfo], given: Mapping[str, Given]) -> list[str]:
    """One sentence for each setting that cannot be used; `given` tells how the user spelled it."""
    problems = dict[str, str]()
    for finding in error.errors(include_url=False, include_input=False):
        name = next((part for part in finding["loc"] if isinstance(part, str) and part in given), None)
        name = name or str(finding["loc"][-1])
        source = given.get(name)
        problems.setdefault(name, _sentence(name, fields[name], source, finding))
    return list(problems.values())


def value_range(info: FieldInfo) -> str | None:
    """'1 to 65536', 'above 0, at most 1' or None where any value of the type is accepted."""
    low = high = ""
    for rule in info.metadata:
        if isinstance(rule, Ge):
            low = f"{rule.ge}"
        elif isinstance(rule, Gt):
            low = f"above {rule.gt}"
        elif isinstance(rule, Le):
            high = f"{rule.le}"
        elif isinstance(rule, Lt):
            high = f"below {rule.lt}"
    if low and high:
        return f"{low}, at most {high}" if low.startswith("above") else f"{low} to {high}"
    return low or high or None


def choices(info: FieldInfo) -> tuple[str, ...]:
    """The words of a setting that takes one of a few; empty for any other."""
    words = get_args(info.annotation)
    return tuple(words) if words and all(isinstance(word, str) for word in words) else ()


def _sentence(name: str, info: FieldInfo, source: Given | None, finding: Mapping[str, Any]) -> str:
    spelled = source.spelled if source else flag(name)
    shown = "" if source is None or info.repr is False else f"={_show(source.value)}"
    kind = finding["type"]
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{spelled}{shown} is out of range: it takes {value_range(info)}."
    if kind in ("literal_error", "enum"):
        return f"{spelled}{shown} is not one of {', '.join(choices(info))}."
    if kind == "value_error":
        return f"{spelled} {finding['ctx']['error']}."
    return f"{spelled}{shown} takes {_KINDS.get(kind) or finding['msg']}."


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
