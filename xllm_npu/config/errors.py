"""What is wrong with the settings a user gave, in sentences for that user."""

from __future__ import annotations

from collections.abc import Iterable


class SettingsError(ValueError):
    """One or more settings cannot be used; every problem names the spelling given and what would work."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
