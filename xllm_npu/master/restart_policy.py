"""Whether an engine that has failed is started again, and how soon: at once, then later and later, then no more."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0  # restarts longer ago are forgotten
LONGEST_PAUSE = 30.0


class RestartPolicy:
    def __init__(self, limit: int) -> None:
        """`limit`: restarts in WINDOW_SECONDS; 0: none ever."""
        self._limit = limit
        self._times: deque[float] = deque()

    def next_pause(self, now: float) -> float | None:
        """Seconds to wait before the restart that this call counts; None: give up."""
        while self._times and now - self._times[0] > WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return None
        self._times.append(now)
        return min(LONGEST_PAUSE, 2.0 ** (len(self._times) - 1) - 1)
