"""How many requests wait, as the HTTP process knows it: what the engines said last, and what was sent since.

Without the latter a burst between two steps would find an empty queue.
"""

from __future__ import annotations


class QueueGauge:
    def __init__(self, engines: int = 1, max_seqs: int = 0) -> None:
        self._max_seqs = max_seqs
        self._running = [0] * engines
        self._waiting = [0] * engines
        self._sent = [0] * engines  # since the engine's last word

    def on_sent(self, engine: int) -> None:
        self._sent[engine] += 1

    def on_stats(self, engine: int, running: int, waiting: int) -> None:
        self._running[engine], self._waiting[engine], self._sent[engine] = running, waiting, 0

    @property
    def waiting(self) -> int:
        """Requests sent into a batch that has room, and no queue before them, do not wait."""
        return sum(waiting + (sent if waiting else max(0, sent - max(0, self._max_seqs - running)))
                   for running, waiting, sent in zip(self._running, self._waiting, self._sent))
