"""Settings as people and programs read them: `xllm-npu config`, and the file of what is not at its default."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.load import Loaded
from xllm_npu.config.settings import Settings, flat_values, section_types, setting_fields
from xllm_npu.config.values import MASK

_SECRETS = ("api_key", "cluster_secret")


def table(loaded: Loaded) -> str:
    """Every effective value and where it came from, by section."""
    values = {name: _show(value) for name, value in masked_values(loaded.settings).items()}
    name_width = max(map(len, values))
    value_width = min(max(map(len, values.values())), 32)
    lines = list[str]()
    for section, kind in section_types().items():
        lines += ["" if not lines else "\n", f"{kind.__doc__} ({section})\n"]
        for name in kind.model_fields:
            source = loaded.sources[name]
            origin = f"{source.kind} ({source.spelled})" if source.spelled else source.kind
            lines.append(f"  {name:<{name_width}}  {values[name]:<{value_width}}  {origin}\n")
    if loaded.others:
        lines.append("\n\nModels, and what is set for one alone (models)\n")
    for own in own_values(loaded.models):
        lines.append("  " + ", ".join(f"{name} {_show(value)}" for name, value in own.items()) + "\n")
    return "".join(lines)


def as_json(loaded: Loaded) -> str:
    """`table` for programs: {name: {section, value, source, given_as}}; of several models the first, and `models` as
    the configuration file has it.
    """
    values = masked_values(loaded.settings)
    rows: dict[str, Any] = {
        name: {
            "section": field.section,
            "value": values[name],
            "source": loaded.sources[name].kind,
            "given_as": loaded.sources[name].spelled or None,
        }
        for name, field in setting_fields().items()
    }
    if loaded.others:
        rows["models"] = own_values(loaded.models)
    return json.dumps(rows, indent=2, ensure_ascii=False)


def own_values(models: Sequence[Settings]) -> list[dict[str, Any]]:
    """What each of several models has for itself; nothing for one model."""
    if len(models) < 2:
        return []
    every = [flat_values(settings) for settings in models]
    own = [name for name in every[0] if name == "model" or any(values[name] != every[0][name] for values in every)]
    return [{name: values[name] for name in own} for values in every]


def masked_values(settings: Settings) -> dict[str, Any]:
    values = flat_values(settings)
    for name in _SECRETS:
        if values[name]:
            values[name] = (MASK,) * len(values[name]) if isinstance(values[name], tuple) else MASK
    return values


def non_default_values(models: Sequence[Settings]) -> dict[str, Any]:
    """What a configuration file needs to give these settings again; without secrets and the file flags."""
    fields, own = setting_fields(), own_values(models)
    shared = {
        name: value
        for name, value in flat_values(models[0]).items()
        if fields[name].section != "files" and name not in _SECRETS and value != fields[name].info.default
        and not (own and name in own[0])
    }
    return {**shared, "models": own} if own else shared


def dump_if_asked(models: Sequence[Settings]) -> Path | None:
    """Write `dump_config_json_file` if `enable_dump_config_json` says so and this is node 0; returns its path."""
    settings = models[0]
    if not settings.files.enable_dump_config_json or settings.distributed.node_rank != 0:
        return None
    path = Path(settings.files.dump_config_json_file).expanduser()
    text = json.dumps(non_default_values(models), indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"--dump-config-json-file={path} cannot be written: {error.strerror}. "
            "Name another file, or leave --enable-dump-config-json out."
        ) from error
    return path


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    return str(value) or "-"
