"""Typed access to a JSON configuration: values checked, complaints naming the key and the file.

Knows no key's meaning, but for the architecture's name, which makes the complaints readable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ModelConfigError(ValueError):
    """A model's configuration is missing a key, contradicts itself, or asks for what is not supported."""


def architecture_of(config: Mapping[str, Any], source: str = "config.json") -> str:
    """The class name of the network, readable even where nothing else of the configuration is understood."""
    names = config.get("architectures")
    if isinstance(names, str):
        names = [names]
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type:  # configurations saved without a model carry no class name
        return model_type.capitalize() + "ForCausalLM"
    raise ModelConfigError(
        f'{source}: "architectures" is missing, so the kind of model is unknown. Set it to a list with the '
        'class name, for example ["LlamaForCausalLM"].'
    )


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{file} does not exist. A model directory holds config.json, *.safetensors and a tokenizer."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ModelConfigError(f"{file} holds a {kind}, not an object with keys. Download it again.")
    return content


class ConfigKeys:
    """Typed access to a configuration's keys; an absent key and a null one are the same, but for `has`."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(f'{self.source}: "{key}" {problem}')

    def get(self, key: str) -> Any:
        return self.config.get(key)

    def has(self, key: str) -> bool:
        return key in self.config

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, f"is missing ({architecture_of(self.config, self.source)} needs it).")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(key, f"must be a positive whole number, not {value!r}.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.optional_number(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a number, not {value!r}.")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}.")
        return value or default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}.")
        return default if value is None else value

    def ids(self, key: str, default: int | None = None) -> list[int]:
        value = self.get(key) if self.has(key) else default
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.error(key, f"must be a token id or a list of them, not {value!r}.")
        return [v for v in values if v >= 0]  # some checkpoints write -1 for "none"

    def required_number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self.error(key, "is missing.")
        return value

    def positive_number(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, f"must be above 0, not {value:g}.")
        return value
