"""How many connections a listener keeps, and what becomes of one too many: it is told so and closed.

A connection is counted while it is open, whether it asks for anything or not. One that is turned away gets its answer
before it has sent a request; it stays half open for a moment, as a close while its request is on the way would take the
answer from it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable

logger = logging.getLogger("xllm_npu.service")

RESERVED_FILES = 256  # for everything that is no client's connection
MAX_TURNED_AWAY = 64  # that are still half open; more are closed at once
TURNED_AWAY_SECONDS = 2.0
REASON = "max_connections"  # in the metric of rejections


class ConnectionLimit:
    def __init__(self, most: int, on_rejected: Callable[[str], None] = lambda _: None) -> None:
        """`most` connections; fewer where the system allows this process too few open files.

        `on_rejected` hears of each that is too many.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and most > (room := max(1, files - RESERVED_FILES, files // 2)):
            logger.info("%d connections at most, not %d: ulimit -n is %d", room, most, files)
            most = room
        self.most = most
        self._on_rejected = on_rejected
        self._turned_away = 0
        self._told = False

    def exceeded_by(self, count: int) -> bool:
        """Whether `count` connections are too many."""
        if count <= self.most:
            return False
        if not self._told:
            self._told = True  # once: clients must not be able to fill the log
            logger.warning("the limit of %d connections (--max_connections) is reached; others are turned away",
                           self.most)
        return True

    def turn_away(self, transport: asyncio.Transport, answer: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Send `answer` and end the connection; what it sends meanwhile is for nobody."""
        self._on_rejected(REASON)
        transport.write(answer)
        if self._turned_away >= MAX_TURNED_AWAY or not transport.can_write_eof():
            transport.close()
            loop.call_later(TURNED_AWAY_SECONDS, transport.abort)
            return
        self._turned_away += 1
        transport.write_eof()
        loop.call_later(TURNED_AWAY_SECONDS, self._end, transport)

    def _end(self, transport: asyncio.Transport) -> None:
        self._turned_away -= 1
        transport.abort()
