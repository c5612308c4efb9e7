"""The environment and the JSON file as lists of given values. Knows names, not meanings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.names import Given, canonical, is_boolean, nearest
from xllm_npu.config.settings import section_types, setting_fields

PREFIX = "XLLM_NPU_"

# Kubernetes puts a service's address into every pod: for one named xllm-npu, XLLM_NPU_PORT=tcp://10.0.0.1:8000 and
# a dozen more. None of them is meant for us.
_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")


def read_environment(environment: Mapping[str, str]) -> list[Given]:
    """`XLLM_NPU_MAX_MODEL_LEN=4096`. An empty value means not set, as compose files write it."""
    given, problems = list[Given](), list[str]()
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or value == "" or _from_kubernetes(variable, value):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if is_boolean(name, {}) is None:
            close = nearest(name)
            hint = f" Did you mean {PREFIX}{close.upper()}?" if close else " Unset it."
            problems.append(f"There is no setting for the environment variable {variable}.{hint}")
        else:
            given.append(Given(name, value, variable))
    if problems:
        raise SettingsError(problems)
    return given


def _from_kubernetes(variable: str, value: str) -> bool:
    if _KUBERNETES_NAME.search(variable):
        return True
    return variable.endswith("_PORT") and _KUBERNETES_PORT.match(value) is not None


@dataclass(slots=True)
class FileContent:
    given: list[Given] = field(default_factory=list)
    models: list[list[Given]] = field(default_factory=list)  # what each entry of `models` sets


def read_json_file(path: str) -> FileContent:
    """Flat keys, or objects named for sections that hold them; both may stand in one file, and in an entry of the
    list `models`, where a text stands for {"model": text}.
    """
    document = _load(path)
    content, problems = FileContent(), list[str]()
    entries = document.pop("models", None)
    _take_object(f"{path}: ", document, content.given, problems)
    if entries is not None and not (isinstance(entries, list) and entries):
        problems.append(f"{path}: models takes a list with an object for each model.")
        entries = None
    for index, entry in enumerate(entries or ()):
        entry = {"model": entry} if isinstance(entry, str) else entry
        where = f"{path}: models[{index}]"
        if not isinstance(entry, dict):
            problems.append(f'{where} takes an object such as {{"model": "smollm2"}}.')
            continue
        content.models.append([])
        _take_object(where + ".", entry, content.models[-1], problems)
    if problems:
        raise SettingsError(problems)
    return content


def _take_object(where: str, document: Mapping[str, Any], given: list[Given], problems: list[str]) -> None:
    for key, value in document.items():
        if isinstance(value, dict) and canonical(key) in section_types():
            for inner, inner_value in value.items():
                _take(where, canonical(key), inner, inner_value, given, problems)
        else:
            _take(where, None, key, value, given, problems)


def _take(
    prefix: str, section: str | None, key: str, value: Any, given: list[Given], problems: list[str]
) -> None:
    name, where = canonical(key), f"{prefix}{section + '.' if section else ''}{key}"
    known = setting_fields().get(name)
    if is_boolean(name, {}) is None:
        close = nearest(name, section_types() if section is None else ())
        problems.append(f"{where} is no setting." + (f" Did you mean {close}?" if close else " Remove it."))
    elif section is not None and known is not None and known.section != section:
        problems.append(f"{where} belongs into {known.section}, or without any section.")
    elif name == "config_json_file":
        problems.append(f"{where} cannot be set in a configuration file.")
    elif isinstance(value, dict):
        problems.append(f"{where} takes a single value, got an object.")
    else:
        given.append(Given(name, value, where))


def _load(path: str) -> dict[str, Any]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"The configuration file {path} is not UTF-8 text.") from error
    try:
        document = json.loads(text, object_pairs_hook=lambda pairs: _no_duplicates(path, pairs))
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"The configuration file {path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    if not isinstance(document, dict):
        raise SettingsError(f'The configuration file {path} must hold a JSON object, such as {{"port": 8000}}.')
    return document


def _no_duplicates(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise SettingsError(f"{path}: {key} stands there twice; keep one.")
        seen[key] = value
    return seen
