"""Which names exist, and the nearest one to a name that does not.

A user spells a name with '-' or '_' (in the environment: in capitals); here it is canonical: lower case, '_'.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from xllm_npu.config import unsupported
from xllm_npu.config.aliases import ALIASES
from xllm_npu.config.settings import setting_fields


@dataclass(frozen=True, slots=True)
class Given:
    """One value as the user gave it. `spelled` is what to call it when talking to that user."""

    name: str  # canonical
    value: Any
    spelled: str


def canonical(name: str) -> str:
    return name.replace("-", "_")


def flag(name: str) -> str:
    """How help and messages spell a setting of which the user gave no spelling."""
    return "--" + name.replace("_", "-")


def is_boolean(name: str, options: Mapping[str, FieldInfo]) -> bool | None:
    """Whether `name` takes no value on the command line; None if there is no such name."""
    if name in options:
        return options[name].annotation is bool
    if name in setting_fields():
        return setting_fields()[name].boolean
    if name in ALIASES:
        return ALIASES[name].boolean
    if name in unsupported.UNSUPPORTED:
        return unsupported.is_boolean(name)
    return None


def nearest(name: str, options: Iterable[str] = ()) -> str | None:
    """The real name a typing error most likely meant; settings we have win over names we only know."""
    ours = [*setting_fields(), *ALIASES, *options]
    if close := difflib.get_close_matches(name, ours, n=1, cutoff=0.7):
        return close[0]
    # A part of a long name: `--utilization`, `--cache-size`.
    if len(name) >= 5 and (longer := [candidate for candidate in setting_fields() if name in candidate]):
        return min(longer, key=len)
    close = difflib.get_close_matches(name, list(unsupported.UNSUPPORTED), n=1, cutoff=0.7)
    return close[0] if close else None
