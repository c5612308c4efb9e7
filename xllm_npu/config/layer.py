"""One source's values after aliases: at most one value for each setting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from xllm_npu.config.aliases import ALIASES, translate_value
from xllm_npu.config.errors import SettingsError
from xllm_npu.config.names import Given
from xllm_npu.config.settings import setting_fields
from xllm_npu.config.unsupported import UNSUPPORTED, refusal

COMMAND_LINE, ARGUMENT, ENVIRONMENT, FILE, DEFAULT = (
    "command line",
    "argument",
    "environment",
    "file",
    "default",
)


@dataclass(slots=True)
class Layer:
    kind: str  # one of the names above
    values: dict[str, Given] = field(default_factory=dict)  # setting -> what was given for it


class LayerSource(PydanticBaseSettingsSource):
    """A layer as pydantic-settings takes it: values nested by section."""

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self()[field_name], field_name, True

    def __call__(self) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, given in self._layer.values.items():
            nested.setdefault(setting_fields()[name].section, {})[name] = given.value
        return nested


def build_layer(kind: str, given: Iterable[Given]) -> Layer:
    """Resolve aliases, refuse what this version lacks, and refuse two spellings that disagree."""
    layer, problems = Layer(kind), list[str]()
    for item in given:
        if item.name in UNSUPPORTED:
            if problem := refusal(item.name, item.spelled, item.value):
                problems.append(problem)
            continue
        try:
            for name, value in _resolve(item).items():
                _put(layer, Given(name, value, item.spelled))
        except SettingsError as error:
            problems.extend(error.problems)
    if problems:
        raise SettingsError(problems)
    return layer


def _resolve(item: Given) -> dict[str, Any]:
    alias = ALIASES.get(item.name)
    if alias is None:
        name, value = translate_value(item.name, item.value)
        return {name: value}
    try:
        return alias.resolve(item.value)
    except SettingsError as error:
        raise SettingsError(f"{item.spelled} {error}.") from error


def _put(layer: Layer, new: Given) -> None:
    old = layer.values.get(new.name)
    if old is not None and setting_fields()[new.name].repeatable:
        layer.values[new.name] = Given(new.name, [*_as_list(old.value), *_as_list(new.value)], new.spelled)
        return
    # One name twice: the last wins, as wrappers that append to a command line expect.
    if old is not None and not _same_spelling(old, new) and not _same_value(old, new):
        raise SettingsError(
            f"{old.spelled} and {new.spelled} set the same thing differently "
            f"({_show(old)} and {_show(new)}); give one of them."
        )
    layer.values[new.name] = new


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _same_spelling(old: Given, new: Given) -> bool:
    def plain(spelled: str) -> str:
        return spelled.lstrip("-").replace("-", "_").removeprefix("no_")

    return plain(old.spelled) == plain(new.spelled)


def _same_value(old: Given, new: Given) -> bool:
    return str(old.value).strip().lower() == str(new.value).strip().lower()


def _show(given: Given) -> str:
    return str(given.value).lower() if isinstance(given.value, bool) else str(given.value)
