"""How one value is written: sizes in bytes, token counts, lists, dtypes, secrets.

Each kind is an annotated type: a flag, an environment variable and a JSON key take the same spellings.
Knows no field and no section.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

MASK = "********"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE | re.ASCII)
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM])", re.ASCII)
_COUNT_UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_DTYPES = {
    "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metavar:
    """What help shows in place of a value."""

    text: str


class Secret(str):
    """A string that only code which uses it as a string sees; repr() and containers print a mask."""

    __slots__ = ()

    def __repr__(self) -> str:
        return MASK


def parse_bytes(value: Any) -> Any:
    """'512MiB', '2GiB', '1.5G' (binary), '2GB' (decimal) or a plain number of bytes."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"takes a size such as 536870912, 512MiB or 2GiB, got {value!r}")
    number, unit, suffix = match.group(1), match.group(2).upper(), (match.group(3) or "").lower()
    base = 1000 if unit and suffix == "b" else 1024
    return round(float(number) * base ** " KMGT".index(unit or " ")) if not number.isdigit() or unit else int(number)


def parse_count(value: Any) -> Any:
    """'32k' is 32000 and '32K' is 32768, as vLLM reads them; anything else is left as it is."""
    if isinstance(value, str) and (match := _COUNT.fullmatch(value.strip())):
        return round(float(match.group(1)) * _COUNT_UNITS[match.group(2)])
    return value


def parse_optional_count(value: Any) -> Any:
    """Like `parse_count`; 'auto' and -1 mean not set."""
    if isinstance(value, str) and value.strip().lower() in ("auto", "none", "-1"):
        return None
    return None if value == -1 and not isinstance(value, bool) else parse_count(value)


def split_list(value: Any) -> Any:
    """'a,b', '["a", "b"]', or a sequence of either (a repeated flag)."""
    if value is None:
        return ()
    if isinstance(value, str):
        return _split_text(value)
    if isinstance(value, (list, tuple)):
        return tuple(part for item in value for part in (_split_text(item) if isinstance(item, str) else (item,)))
    return (value,)


def _split_text(text: str) -> tuple[Any, ...]:
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"takes a comma-separated list or a JSON list, got {text!r}") from error
        return tuple(items)
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = value.strip().lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


def parse_object(value: Any) -> Any:
    """A JSON object, as text or from a file; kept as text."""
    if isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        found = json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"takes a JSON object, got {value[:200]!r}")
    return value


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


ByteCount = Annotated[int, BeforeValidator(parse_bytes), Metavar("SIZE")]
TokenCount = Annotated[int, BeforeValidator(parse_count), Metavar("N")]
OptionalTokenCount = Annotated[int | None, BeforeValidator(parse_optional_count), Metavar("N")]
JsonObject = Annotated[str, BeforeValidator(parse_object), Metavar("JSON")]
FilePath = Annotated[str | None, Metavar("FILE")]
Names = Annotated[tuple[str, ...], BeforeValidator(split_list), Metavar("NAME,...")]
Counts = Annotated[tuple[int, ...], BeforeValidator(split_list), Metavar("N,...")]
Secrets = Annotated[tuple[Annotated[str, AfterValidator(Secret)], ...], BeforeValidator(split_list), Metavar("KEY,...")]
OptionalSecret = Annotated[str | None, AfterValidator(lambda text: text and Secret(text)), Metavar("TEXT")]
CaseFolded = BeforeValidator(_lower)
DtypeSpelling = BeforeValidator(parse_dtype)
