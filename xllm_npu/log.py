"""Log lines: set up once in each process, on stderr, short enough to read and easy to grep.

    2026-01-31 12:34:56.789 I engine: 1,024 KV blocks

Libraries log at warning and above unless debug is asked for. Knows no settings object: takes a level's name.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
ROOTS = ("xllm_npu", "xllm_models", "xllm_platform", "xllm_kernels_npu")


class LineFormatter(logging.Formatter):
    """Time, the level's first letter, the module's last name; a further line of a message is indented."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = f"[{process}] " if process else ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{stamp}.{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            text += "\n" + self.formatStack(record.stack_info)
        name = record.name.rsplit(".", 1)[-1]
        head = f"{self.formatTime(record)} {record.levelname[0]} {self._process}{name}: "
        # One record must not be able to forge another: whatever follows a line break is indented.
        return head + "\n    ".join(text.splitlines() or [""])


def setup_logging(level: str = "info", *, process: str = "", stream: TextIO | None = None) -> None:
    """`process` names a child in its lines. Calling again replaces the earlier set-up."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h.formatter, LineFormatter)]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root.addHandler(handler)
    chosen = LEVELS[level]
    root.setLevel(chosen if chosen == logging.DEBUG else max(chosen, logging.WARNING))
    for name in ROOTS:
        logging.getLogger(name).setLevel(chosen)
