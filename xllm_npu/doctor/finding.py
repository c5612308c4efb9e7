"""What one look at the machine came to: what was looked at and found, why it matters, what to do.

Knows neither machine nor settings. Codes are for programs: they stay when sentences change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Mark = Literal["ok", "note", "problem"]
INDENT = " " * 8


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok`: as it should be. `note`: serving works, something could be better. `problem`: it does not."""

    mark: Mark
    code: str  # subject.what, e.g. driver.old
    what: str
    found: str
    why: str = ""
    todo: str = ""

    def text(self) -> str:
        """One to three lines for people."""
        lines = [f"{self.mark:<{len(INDENT)}}{self.what}: {self.found}"]
        if self.why:
            lines.append(f"{INDENT}   {self.why}")
        if self.todo:
            lines.append(f"{INDENT}-> {self.todo}")
        return "\n".join(lines)

    def sentence(self) -> str:
        """One line for a log."""
        parts = (f"{self.what}: {self.found}", self.why, self.todo)
        return "; ".join(part for part in parts if part)


def ok(code: str, what: str, found: str) -> Finding:
    return Finding("ok", code, what, found)


def note(code: str, what: str, found: str, why: str, todo: str) -> Finding:
    return Finding("note", code, what, found, why, todo)


def problem(code: str, what: str, found: str, why: str, todo: str) -> Finding:
    return Finding("problem", code, what, found, why, todo)


def softened(findings: Iterable[Finding]) -> list[Finding]:
    """Problems of a device that nobody asked for are notes."""
    return [replace(f, mark="note") if f.mark == "problem" else f for f in findings]


def can_serve(findings: Iterable[Finding]) -> bool:
    return all(finding.mark != "problem" for finding in findings)
