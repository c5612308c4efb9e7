"""Log lines: set up once in each process, on stderr, short enough to read and easy to grep.

    2026-01-31 12:34:56.789 I engine: 1,024 KV blocks

or, as `json`, one object a line for programs. Libraries log at warning and above unless debug is asked for. Knows no
settings object: takes a level's name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the HTTP request that is served here
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


class JsonFormatter(logging.Formatter):
    """time (RFC 3339, UTC), level, logger, message; process, request_id and exception where there is one."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
            "pid": record.process, "process": self._process, "request_id": REQUEST_ID.get(),
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
            "stack": self.formatStack(record.stack_info) if record.stack_info else "",
        }
        given = {name: value for name, value in fields.items() if value not in ("", None)}
        return json.dumps(given)  # ASCII: some readers take U+2028 for the end of a line


def setup_logging(
    level: str = "info", *, process: str = "", stream: TextIO | None = None, form: str = "text"
) -> None:
    """`process` names a child in its lines; `form` is text or json. Calling again replaces the earlier set-up."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h.formatter, LineFormatter | JsonFormatter)]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else LineFormatter(process))
    root.addHandler(handler)
    chosen = LEVELS[level]
    root.setLevel(chosen if chosen == logging.DEBUG else max(chosen, logging.WARNING))
    for name in ROOTS:
        logging.getLogger(name).setLevel(chosen)
