"""The one frozen object that says how this server is set.

Building a `Settings` reads neither the environment nor a file: `config.load` does, and hands the layers over.
What follows from a setting is a value or a function of its own; nothing is ever written back.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from xllm_npu.config.execution import ExecutionSettings
from xllm_npu.config.files import FileSettings
from xllm_npu.config.kv_cache import KvCacheSettings
from xllm_npu.config.lora import LoraSettings
from xllm_npu.config.model import ModelSettings
from xllm_npu.config.parallel import DistributedSettings, ParallelSettings
from xllm_npu.config.profile import ProfileSettings
from xllm_npu.config.scheduler import SchedulerSettings
from xllm_npu.config.section import Section
from xllm_npu.config.service import ServiceSettings


class Settings(BaseSettings):
    """Everything a user may set, by section."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    model: ModelSettings = ModelSettings()
    service: ServiceSettings = ServiceSettings()
    kv_cache: KvCacheSettings = KvCacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    execution: ExecutionSettings = ExecutionSettings()
    lora: LoraSettings = LoraSettings()
    profile: ProfileSettings = ProfileSettings()
    parallel: ParallelSettings = ParallelSettings()
    distributed: DistributedSettings = DistributedSettings()
    files: FileSettings = FileSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # a child process must see what its parent saw


class SettingField(NamedTuple):
    """One setting: its section, its (flat, unique) name and its declaration."""

    section: str
    name: str
    info: FieldInfo

    @property
    def boolean(self) -> bool:
        return self.info.annotation is bool

    @property
    def repeatable(self) -> bool:
        return getattr(self.info.annotation, "__origin__", None) is tuple


def section_types() -> dict[str, type[Section]]:
    """Attribute name -> section class, in the order in which help shows them."""
    return {name: info.annotation for name, info in Settings.model_fields.items()}  # type: ignore[misc]


@cache
def setting_fields() -> dict[str, SettingField]:
    """Every setting by its flat name."""
    return {
        name: SettingField(section, name, info)
        for section, kind in section_types().items()
        for name, info in kind.model_fields.items()
    }


def flat_values(settings: Settings) -> dict[str, Any]:
    """Every setting's value by its flat name; secrets as they are."""
    return {name: getattr(getattr(settings, f.section), name) for name, f in setting_fields().items()}


def served_model_names(settings: Settings) -> tuple[str, ...]:
    """The names a request may give as `model`, the one to show first."""
    if settings.service.served_model_name:
        return settings.service.served_model_name
    if settings.model.model_id:
        return (settings.model.model_id,)
    path = Path(settings.model.model).expanduser()
    return (path.resolve().name,) if path.exists() else (settings.model.model,)


def spans_machines(settings: Settings) -> bool:
    """Whether other machines (or Ray) have to be asked for devices."""
    return settings.distributed.nnodes > 1 or settings.distributed.placement == "ray"
