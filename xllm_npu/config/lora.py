"""LoRA adapters: whether requests may name them, how many and how large they may be, and those loaded at the start."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from xllm_npu.config.section import Section
from xllm_npu.config.values import Metavar

MAX_NAME_CHARS = 256
DEFAULT_LOADED = 32


class LoraModule(BaseModel):
    """One adapter: the name that requests give as `model`, and its directory."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    path: str = Field(min_length=1)
    base_model_name: str | None = None  # shown as the adapter's parent


def parse_modules(value: Any) -> Any:
    """NAME=PATH, a JSON object with name, path and base_model_name, or a sequence or JSON list of either."""
    if value is None or value == "":
        return ()
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value)
    items = value if isinstance(value, list | tuple) else (value,)
    return tuple(_module(item) for item in items)


def _module(item: Any) -> Any:
    if isinstance(item, LoraModule):
        return item
    found = item
    if isinstance(item, str) and item.lstrip().startswith("{"):
        found = _parsed(item)
    elif isinstance(item, str):
        name, _, path = item.partition("=")
        found = {"name": name.strip(), "path": path.strip()}
    if not isinstance(found, dict) or not (_is_text(found.get("name")) and _is_text(found.get("path"))):
        raise ValueError(f"takes NAME=PATH or a JSON object with name and path, got {item!r}")
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"takes NAME=PATH or JSON, got {text!r}") from error


class LoraSettings(Section):
    """LoRA adapters"""

    enable_lora: bool = Field(default=False, description="requests may name LoRA adapters as their model")
    lora_modules: Annotated[
        tuple[LoraModule, ...], BeforeValidator(parse_modules), Metavar("NAME=PATH")
    ] = Field(default=(), description="adapters to load at the start; repeatable, also as JSON with name and path")
    max_loras: int = Field(default=1, ge=1, le=1024, description="most different adapters in one step")
    max_lora_rank: int = Field(default=16, ge=1, le=512, description="largest rank of an adapter")
    max_cpu_loras: int = Field(
        default=0, ge=0, le=65536,
        description=f"most adapters loaded at once, in host memory; 0: {DEFAULT_LOADED}, or max_loras if that is more",
    )
    allow_runtime_lora_updating: bool = Field(
        default=False, description="clients may load and unload adapters: /v1/load_lora_adapter of the API"
    )

    @field_validator("lora_modules")
    @classmethod
    def _distinct(cls, modules: tuple[LoraModule, ...]) -> tuple[LoraModule, ...]:
        names = [module.name for module in modules]
        if len(set(names)) != len(names):
            raise ValueError(f"names an adapter twice: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
        return modules

    @property
    def most_loaded(self) -> int:
        return self.max_cpu_loras or max(DEFAULT_LOADED, self.max_loras)
