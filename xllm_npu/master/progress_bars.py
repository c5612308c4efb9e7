"""Bars on a terminal while an `LLM` starts and while it generates; nothing where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from xllm_npu.state.messages import EngineProgress

ProgressListener = Callable[[EngineProgress], None]


@contextmanager
def generation_bar(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yields what to call when a request is done, with the number of its tokens."""
    if not (wanted and total and sys.stderr.isatty()):
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[tokens]} tokens"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task, generated = bar.add_task("", total=total, tokens=0), 0

        def advance(tokens: int) -> None:
            nonlocal generated
            generated += tokens
            bar.update(task, advance=1, tokens=generated)

        yield advance


@contextmanager
def startup_bar() -> Iterator[ProgressListener | None]:
    """Yields a listener that shows each stage as a bar; None if there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def listen(progress: EngineProgress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(progress.stage)
            bar.update(tasks[progress.stage], completed=progress.done, total=progress.total or None)

        yield listen
