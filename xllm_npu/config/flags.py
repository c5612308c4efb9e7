"""Command-line words to given values. Knows which names are booleans, and nothing about what values mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic.fields import FieldInfo

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.names import Given, canonical, flag, is_boolean, nearest

_NUMBER = re.compile(r"-(\d|\.\d)[\d.eE+-]*")
_ADAPTER = re.compile(r"[^=/]+=|\s*\{")
_SHORT = ("-tp", "-dp", "-pp")  # the only one-dash names


@dataclass(slots=True)
class ParsedFlags:
    given: list[Given] = field(default_factory=list)  # in the order of the command line
    positionals: list[str] = field(default_factory=list)


def parse_flags(words: Sequence[str], options: Mapping[str, FieldInfo] | None = None) -> ParsedFlags:
    """`options` are further names that only this verb has. Raises SettingsError with every unusable word."""
    options = options or {}
    parsed, problems = ParsedFlags(), list[str]()
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--":
            parsed.positionals.extend(words[index:])
            break
        if not _is_flag(word):
            parsed.positionals.append(word)
            continue
        try:
            given, used = _parse_flag(word, words[index : index + 1], options)
            parsed.given.append(given)
            index += used
            if given.name == "lora_modules":  # the one name that takes several words
                more = _lora_modules(words[index:])
                parsed.given += [Given(given.name, value, word) for value in words[index : index + more]]
                index += more
        except SettingsError as error:
            problems.extend(error.problems)
            # The value of a flag we do not know is no second mistake.
            if "=" not in word and index < len(words) and not _is_flag(words[index]):
                index += 1
    if problems:
        raise SettingsError(problems)
    return parsed


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not _NUMBER.fullmatch(word)


def _parse_flag(word: str, following: Sequence[str], options: Mapping[str, FieldInfo]) -> tuple[Given, int]:
    """One flag, and how many following words it used."""
    spelled, equals, value = word.partition("=")
    name = canonical(spelled.lstrip("-"))
    if not spelled.startswith("--") and spelled not in _SHORT:
        raise SettingsError(_unknown(spelled, name, options))
    boolean = is_boolean(name, options)
    if boolean is None:
        positive = name.removeprefix("no_")
        if positive == name or not is_boolean(positive, options):
            raise SettingsError(_unknown(spelled, name, options))
        if equals:
            raise SettingsError(f"{spelled} takes no value; write {flag(positive)}={value}.")
        return Given(positive, "false", spelled), 0
    if equals:
        return Given(name, value, spelled), 0
    if boolean:
        # Only these two words: anything else after a boolean is the model or the next flag.
        if following and following[0].lower() in ("true", "false"):
            return Given(name, following[0].lower(), spelled), 1
        return Given(name, "true", spelled), 0
    if not following or _is_flag(following[0]):
        raise SettingsError(f"{spelled} needs a value: {spelled} VALUE or {spelled}=VALUE.")
    return Given(name, following[0], spelled), 1


def _lora_modules(words: Sequence[str]) -> int:
    """How many of the words that follow vLLM's --lora-modules are further adapters."""
    return next((i for i, word in enumerate(words) if _is_flag(word) or not _ADAPTER.match(word)), len(words))


def _unknown(spelled: str, name: str, options: Mapping[str, FieldInfo]) -> str:
    close = nearest(name, options)
    if close is None and name.startswith("no_"):
        close = nearest(name.removeprefix("no_"), options)
    hint = f" Did you mean {flag(close)}?" if close else " `xllm-npu serve --help` lists every flag."
    return f"There is no flag {spelled}.{hint}"
