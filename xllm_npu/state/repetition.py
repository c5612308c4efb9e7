"""When a sequence repeats itself: its last tokens are one pattern, several times in a row.

`RepetitionDetection` is what a request says, `RepetitionDetector` watches one sequence. A pattern of L tokens stands
`min_count` times at the end exactly if each of the last L * (min_count - 1) tokens equals the one L before it: for
each L one counter of such tokens in a row is enough. Knows token ids only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_PATTERN_SIZE = 512
MAX_REPETITIONS = 1024


@dataclass(slots=True, frozen=True, kw_only=True)
class RepetitionDetection:
    """End a sequence once a pattern of min_pattern_size to max_pattern_size tokens stands min_count times in a row."""

    max_pattern_size: int = 0  # 0: off
    min_pattern_size: int = 0  # 0: 1
    min_count: int = 0

    @property
    def off(self) -> bool:
        return self.max_pattern_size == 0


class RepetitionDetector:
    def __init__(self, settings: RepetitionDetection) -> None:
        self._longest = settings.max_pattern_size
        sizes = np.arange(max(settings.min_pattern_size, 1), self._longest + 1, dtype=np.int32)  # [P]
        self._needed = sizes * (settings.min_count - 1)  # [P]
        self._in_a_row = np.zeros_like(sizes)  # [P] last tokens that equal the one `size` before them
        self._back = -sizes  # [P]
        self._tokens = np.full(4 * self._longest, -1, np.int32)  # a window of the last ones, -1 before the first
        self._end = self._longest  # where the next token goes

    def push(self, token_id: int) -> bool:
        """One more token; True if the sequence repeats itself now."""
        if self._end == self._tokens.size:
            self._tokens[: self._longest] = self._tokens[-self._longest :]
            self._end = self._longest
        self._tokens[self._end] = token_id
        same = self._tokens[self._end + self._back] == token_id
        self._end += 1
        self._in_a_row += 1
        self._in_a_row *= same
        return bool((self._in_a_row >= self._needed).any())
