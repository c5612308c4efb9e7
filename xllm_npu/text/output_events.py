"""What a model's output means, piece by piece: text for the user, reasoning, and calls of tools.

Events come in the order of the text. A call is one event, made when the call is complete: nobody ever sees half of
one. Knows no format and no API.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """The next part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next part of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `index` counts the calls of a sequence from 0; `arguments` is the JSON text of an object.

    `id` is the one that the model wrote, where its format has ids.
    """

    index: int
    name: str
    arguments: str
    id: str | None = None


Event = Content | Reasoning | ToolCall
