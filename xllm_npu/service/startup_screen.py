"""What the operator sees while the server starts: each long step's progress, then one screen of facts and the URL.

On a terminal, rich bars and a table; elsewhere plain lines, few enough for a log. Writes to stderr, so that
stdout stays free for whoever pipes it. Knows nothing of the engine but its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from xllm_npu.state.messages import EngineProgress, EngineReady, PoolingInfo, WeightLoad
from xllm_npu.version import __version__

_IMPLEMENTATIONS = {
    "native": "native", "transformers": "transformers' modelling code with the paged attention of this package",
}  # fmt: skip
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class StartupScreen:
    """A context manager around the loading phase; `on_progress` may be called any number of times."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream, stderr=stream is None)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._quarters: dict[str, int] = {}  # plain lines: the last quarter told of each stage

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress = Progress(TextColumn("{task.description}"), BarColumn(),
                                      TextColumn("{task.fields[amount]}"), TimeElapsedColumn(),
                                      console=self._console)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def on_progress(self, progress: EngineProgress, model: str = "") -> None:
        """`model` names the one that loads, where there are several."""
        if model:
            progress = msgspec.structs.replace(progress, stage=f"{model}: {progress.stage}")
        if self._progress is not None:
            self._draw(self._progress, progress)
        else:
            self._tell(progress)

    def show_ready(
        self, models: Sequence[tuple[EngineReady, tuple[str, ...]]], url: str, admin_url: str | None = None
    ) -> None:
        """Each model with its names."""
        sections = [facts(info, names) for info, names in models]
        sections.append([("Admin routes at", admin_url)] if admin_url is not None else [])
        sections[-1].append(("Serving at", url))
        if not self._console.is_terminal:
            for name, value in (row for section in sections for row in section):
                self._line(f"{name}: {value}")
            return
        table = Table(title=f"xllm-npu {__version__}", show_header=False, title_justify="left")
        for section in sections:
            for name, value in section:
                table.add_row(name, value)
            if len(models) > 1:
                table.add_section()
        self._console.print(table)

    def _draw(self, bars: Progress, progress: EngineProgress) -> None:
        total = progress.total or None
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = bars.add_task(progress.stage, total=total, amount="")
        bars.update(self._tasks[progress.stage], completed=progress.done, total=total, amount=amount(progress))

    def _tell(self, progress: EngineProgress) -> None:
        quarter = 4 * progress.done // progress.total if progress.total else 0
        if self._quarters.get(progress.stage, -1) < quarter:
            self._quarters[progress.stage] = quarter
            self._line(" ".join(part for part in (progress.stage, amount(progress)) if part))

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def facts(info: EngineReady, model_names: tuple[str, ...]) -> list[tuple[str, str]]:
    tokens = info.num_kv_blocks * info.block_size
    sizes = info.graph_sizes
    up_to = "as needed, up to " if info.elastic_kv_cache else ""
    each = " in each engine" if info.engines > 1 else ""
    weights = byte_text(info.weight_bytes) + (", dummy weights" if info.load_format == "dummy" else "")
    return [
        ("Platform", f"{info.platform}, {info.device}"),
        ("Model", f"{', '.join(model_names)} ({info.architecture}), {info.dtype}, {weights}"),
        ("Network", _IMPLEMENTATIONS.get(info.implementation, info.implementation)),
        *((f"Weights of rank {load.rank}", load_text(load)) for load in info.weight_loads),
        *((("Engines", f"{info.engines}, {'stepping together' if info.steps_together else 'independent'}"),)
          if each else ()),
        ("Context", f"{info.max_model_len:,} tokens"),
        *((("Gives", pooling_text(info.pooling)),) if info.pooling is not None else ()),
        ("KV cache", f"{up_to}{info.num_kv_blocks:,} blocks of {info.block_size}{each}: {tokens:,} tokens, "
                     f"{byte_text(info.kv_cache_bytes)}{' in all' if each else ''}" if info.kv_cache_bytes else "none"),
        ("Batch", f"up to {info.max_seqs:,} sequences, {info.max_tokens_per_batch:,} tokens a step{each}"),
        ("Graphs", ", ".join(map(str, sizes)) if sizes else "off"),
        *((("Graphs of prompts", f"{', '.join(map(str, info.prefill_graph_sizes))} tokens"),)
          if info.prefill_graph_sizes else ()),
        ("Loaded in", f"{info.load_seconds:.1f} s"),
    ]


def pooling_text(pooling: PoolingInfo) -> str:
    if pooling.task == "embed":
        return f"embeddings of {pooling.width:,} values{' and length 1' if pooling.normalize else ''}"
    return "scores" if len(pooling.labels) == 1 else f"one of {len(pooling.labels):,} classes"


def load_text(load: WeightLoad) -> str:
    return (f"{byte_text(load.bytes)} in {load.seconds:.1f} s, host memory at most {byte_text(load.peak_bytes)} above "
            "the start")


def amount(progress: EngineProgress) -> str:
    if not progress.total:
        return f"{progress.done:,} {progress.unit}".strip() if progress.done else ""
    if progress.unit in ("B", "bytes"):
        return f"{byte_text(progress.done)} of {byte_text(progress.total)}"
    return f"{progress.done:,} of {progress.total:,} {progress.unit}".strip()


def byte_text(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(BYTE_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {BYTE_UNITS[unit]}" if unit == 0 else f"{count:.1f} {BYTE_UNITS[unit]}"
