"""A Dockerfile, read: stages, instructions with their arguments, build arguments with their defaults.

Only what ours use: no here-documents, no parser directives, the escape character is the backslash.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

WORDS = {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
         "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}  # fmt: skip
_VARIABLE = re.compile(r"\$(?:\{(\w+)[^}]*\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    word: str
    text: str  # continuation lines joined, comments within them left out
    line: int

    @property
    def listed(self) -> list[str] | None:
        """The words of the JSON form; None in the shell form."""
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if isinstance(words, list) else None

    @property
    def variables(self) -> set[str]:
        return {a or b for a, b in _VARIABLE.findall(self.text)}


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, word: str) -> list[Instruction]:
        return [i for i in self.instructions if i.word == word]

    def last(self, word: str) -> Instruction:
        return self.of(word)[-1]


@dataclass
class Dockerfile:
    arguments: dict[str, str]  # before the first FROM
    stages: list[Stage]

    @property
    def image(self) -> Stage:
        return self.stages[-1]


def read(path: Path) -> Dockerfile:
    """Raises ValueError for what is no instruction."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for instruction in _instructions(path.read_text("utf-8")):
        if instruction.word == "FROM":
            base, _, name = instruction.text.partition(" AS ")
            stages.append(Stage(base.strip(), name.strip()))
        elif stages:
            stages[-1].instructions.append(instruction)
        elif instruction.word == "ARG":
            arguments.update([assigned(instruction)])
        else:
            raise ValueError(f"line {instruction.line}: {instruction.word} before FROM")
    return Dockerfile(arguments, stages)


def assigned(argument: Instruction) -> tuple[str, str]:
    name, _, value = argument.text.partition("=")
    return name, value.strip('"')


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    held, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not held and not line.strip()):
            continue
        began = began if held else number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        word, _, rest = (held + line).strip().partition(" ")
        held = ""
        if word not in WORDS:
            raise ValueError(f"line {began}: {word} is no instruction")
        found.append(Instruction(word, rest.strip(), began))
    if held:
        raise ValueError(f"line {began}: it goes on past the end of the file")
    return found
