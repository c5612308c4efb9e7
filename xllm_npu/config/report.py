"""Settings as people and programs read them: `xllm-npu config`, and the file of what is not at its default."""

from __future__ import annotations

import json
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
    return "".join(lines)


def as_json(loaded: Loaded) -> str:
    """`table` for programs: {name: {section, value, source, given_as}}."""
    values = masked_values(loaded.settings)
    rows = {
        name: {
            "section": field.section,
            "value": values[name],
            "source": loaded.sources[name].kind,
            "given_as": loaded.sources[name].spelled or None,
        }
        for name, field in setting_fields().items()
    }
    return json.dumps(rows, indent=2, ensure_ascii=False)


def masked_values(settings: Settings) -> dict[str, Any]:
    values = flat_values(settings)
    for name in _SECRETS:
        if values[name]:
            values[name] = (MASK,) * len(values[name]) if isinstance(values[name], tuple) else MASK
    return values


def non_default_values(settings: Settings) -> dict[str, Any]:
    """What a configuration file needs to give these settings again; without secrets and the file flags."""
    fields = setting_fields()
    return {
        name: value
        for name, value in flat_values(settings).items()
        if fields[name].section != "files" and name not in _SECRETS and value != fields[name].info.default
    }


def dump_if_asked(settings: Settings) -> Path | None:
    """Write `dump_config_json_file` if `enable_dump_config_json` says so and this is node 0; returns its path."""
    if not settings.files.enable_dump_config_json or settings.distributed.node_rank != 0:
        return None
    path = Path(settings.files.dump_config_json_file).expanduser()
    text = json.dumps(non_default_values(settings), indent=2, ensure_ascii=False) + "\n"
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
