"""Runs a function of a test module in several processes that form a torch.distributed world (over gloo).

    answers = run_ranks(function, 2, "an argument")  # in the test

    def function(world: World, argument):  # at the top level of the test's module
        with world.join(tp_size=2) as parallel: ...
        return {"logits": tensor}

Ranks import the test's module: what they do not need, such as transformers, is better imported inside its tests.
A world may be joined several times, in the same order by all ranks, so that many layouts cost one start of processes.
Arguments are what JSON has, answers what torch.save has (tensors, lists, dicts, numbers, strings). The first rank that
fails decides: its traceback is the test's error, and all processes are killed. None outlives the call.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from xllm_platform.parallel import ParallelInit, ParallelState

ROOT = Path(__file__).parents[2]


class World:
    """What one rank knows: its number, how many there are, and a directory that all share."""

    def __init__(self, rank: int, size: int, directory: str, timeout: float) -> None:
        self.rank, self.size, self.directory, self.timeout = rank, size, Path(directory), timeout
        self._joined = 0

    @contextlib.contextmanager
    def join(self, backend: str = "gloo", **layout: Any) -> Iterator[ParallelState]:
        """`layout`: the fields of ParallelInit beyond rank, world and meeting place."""
        self._joined += 1
        init = ParallelInit(rank=self.rank, world_size=self.size, timeout_seconds=self.timeout,
                            init_method=f"file://{self.directory}/meet-{self._joined}", **layout)
        parallel = ParallelState.initialize(init, backend)
        try:
            yield parallel
        except BaseException:
            self.note_failure()  # before the others lose their connection, and fail of that
            raise
        finally:
            parallel.shutdown()

    def note_failure(self) -> None:
        with contextlib.suppress(FileExistsError), (self.directory / "first-failure").open("x") as file:
            file.write(f"rank {self.rank} failed\n{traceback.format_exc()}")


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 240) -> list[Any]:
    """[what rank 0 returned, rank 1, ...]. `timeout` in seconds, for everything."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        task = {"file": function.__code__.co_filename, "function": function.__name__, "size": size,
                "directory": directory, "timeout": timeout, "arguments": arguments}
        processes = [_start(task, rank, directory) for rank in range(size)]
        try:
            _wait(processes, directory, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [torch.load(Path(directory, f"answer-{rank}"), weights_only=True) for rank in range(size)]


def _start(task: dict[str, Any], rank: int, directory: str) -> subprocess.Popen[bytes]:
    roots = [ROOT, *(ROOT / name for name in ("platform", "kernels_npu", "models"))]
    paths = [*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with Path(directory, f"output-{rank}").open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", "tests.support.ranks", json.dumps({**task, "rank": rank})],
                                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _wait(processes: list[subprocess.Popen[bytes]], directory: str, deadline: float) -> None:
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    states = [process.poll() for process in processes]
    guilty = [rank for rank, code in enumerate(states) if code] or [r for r, code in enumerate(states) if code is None]
    if guilty:
        first = Path(directory, "first-failure")
        if first.exists():
            raise AssertionError(f"{first.read_text()}\nexit codes {states}")
        output = Path(directory, f"output-{guilty[0]}").read_text(errors="replace")
        what = "failed" if states[guilty[0]] is not None else "did not end in time"
        raise AssertionError(f"rank {guilty[0]} {what}; exit codes {states}\n{output[-6000:]}")


def _main(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("ranks_task", task["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks_task"] = module
    spec.loader.exec_module(module)
    world = World(task["rank"], task["size"], task["directory"], task["timeout"])
    answer = getattr(module, task["function"])(world, *task["arguments"])
    place = Path(task["directory"], f"answer-{task['rank']}")
    torch.save(answer, place)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
