"""The text of `--help`: every flag with its default, by section, within 80 columns. Made from the declarations."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from xllm_npu.config.aliases import ALIASES
from xllm_npu.config.explain import choices
from xllm_npu.config.names import flag
from xllm_npu.config.section import Section
from xllm_npu.config.settings import section_types
from xllm_npu.config.values import Metavar

WIDTH = 80
_INDENT = 6

SPELLING_NOTES = """\
Flags take - or _ in their names and --flag=VALUE or --flag VALUE; switches are
--flag, --flag=false or --no-flag. Every setting is also an environment variable
(XLLM_NPU_BLOCK_SIZE=64) and a key of the file that --config-json-file names.
The command line wins over the environment, that over the file."""


def settings_help(sections: Iterable[str] | None = None) -> str:
    """All sections, or those named."""
    wanted = section_types() if sections is None else {name: section_types()[name] for name in sections}
    return "\n".join(section_help(kind) for kind in wanted.values())


def section_help(kind: type[Section]) -> str:
    aliases = _aliases_by_target()
    entries = (_entry(name, info, aliases.get(name, ())) for name, info in kind.model_fields.items())
    return f"{kind.__doc__}:\n" + "".join(entries)


def _entry(name: str, info: FieldInfo, aliases: Iterable[str]) -> str:
    head = f"  {flag(name)}{_value_part(info)}"
    text = info.description or ""
    if (default := _default(info)) is not None:
        text += f" [{default}]"
    if aliases:
        text += f" (also {', '.join(aliases)})"
    # Long dashes-and-words names must not be broken in the middle.
    body = textwrap.wrap(text, WIDTH - _INDENT, break_on_hyphens=False, break_long_words=False)
    return head + "\n" + "".join(f"{' ' * _INDENT}{line}\n" for line in body)


def _value_part(info: FieldInfo) -> str:
    if info.annotation is bool:
        return ""
    if words := choices(info):
        joined = "|".join(words)
        return f" {joined}" if len(joined) <= 40 else " WORD"
    metavar = next((rule.text for rule in info.metadata if isinstance(rule, Metavar)), None)
    return f" {metavar or _KIND_NAMES.get(info.annotation, 'TEXT')}"


_KIND_NAMES: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT"}


def _default(info: FieldInfo) -> str | None:
    if info.default is None or info.default in ((), ""):
        return None
    if isinstance(info.default, bool):
        return "on" if info.default else "off"
    if "SIZE" in (rule.text for rule in info.metadata if isinstance(rule, Metavar)) and info.default:
        return f"{info.default // 2**20}MiB"
    return "no limit" if info.default == 2**31 - 1 else str(info.default)


def _aliases_by_target() -> dict[str, list[str]]:
    """Only those that mean the same; the ones that turn their value have a name that says so."""
    found: dict[str, list[str]] = {}
    for name, alias in ALIASES.items():
        if alias.convert is None:
            found.setdefault(alias.target, []).append(f"-{name}" if len(name) == 2 else flag(name))
    return found
