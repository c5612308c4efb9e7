"""`ServerProcess`: one `xllm-npu serve` as a user starts it, with everything that a test asks of a process.

It has a temporary directory of its own. Leaving the `with` block stops the server and asserts that it left nothing
behind: no process of its tree, no socket directory. All waiting is polling with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.short_paths import short_directory

DEADLINE = 30.0  # for what should take a second or two; the machine may be busy
ANSWER_DEADLINE = 120.0  # for an answer over HTTP: requests may be open while a test does other things
START_DEADLINE = 200.0  # a machine's first start compiles kernels
POLL = 0.02
FAST = ("--num-threads", "1", "--max-cache-size", "20MiB", "--block-size", "16", "--max-seqs-per-batch", "64")
ENGINE, WORKER = "xllm_npu.master.engine_process", "xllm_npu.execution.worker_process"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
T = TypeVar("T")


def poll(question: Callable[[], T], what: str, deadline: float = DEADLINE) -> T:
    """The first true answer; AssertionError that names `what` after `deadline` seconds."""
    until = time.monotonic() + deadline
    while not (answer := question()):
        assert time.monotonic() < until, f"waited {deadline:g} s for {what}"
        time.sleep(POLL)
    return answer


class ServerProcess:
    """`ready=False` returns from `__enter__` as soon as the process is started. `prefix` runs it elsewhere."""

    alarms = ("Traceback", "please report this", "unexpected failure", "resource_tracker")  # must not be on stderr

    def __init__(self, model: str | Path, directory: Path, *flags: str, ready: bool = True, uds: bool = False,
                 prefix: Sequence[str] = ()) -> None:
        self._model, self._ready = str(model), ready
        self._directory = directory
        self._tmp = short_directory()
        self.uds = str(directory / "server.socket") if uds else None
        address = ["--uds", self.uds] if self.uds else ["--port", "0"]
        named = [self._model] if self._model else []  # else what a configuration file names
        self._command = [*prefix, sys.executable, "-m", "xllm_npu.cli", "serve", *named, *address, *FAST, *flags]
        self._tree: dict[int, psutil.Process] = {}

    @classmethod
    def of_file(cls, file: Path, directory: Path, *flags: str, uds: bool = False) -> Self:
        """What is served is in a configuration file."""
        return cls("", directory, "--config-json-file", str(file), *flags, uds=uds)

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("XLLM_NPU_")}
        environment |= {"TMPDIR": str(self._tmp), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with open(self._directory / "stdout", "wb") as out, open(self._directory / "stderr", "wb") as err:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True)
        self._self = psutil.Process(self._process.pid)
        try:
            if self._ready:
                self.wait_ready()
        except BaseException:
            self._kill_tree()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.running:
                self.stop()
            if kind is None:
                self.assert_nothing_left()
        finally:
            self._kill_tree()

    # What it is

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def stderr(self) -> str:
        return (self._directory / "stderr").read_text()

    @property
    def engine_pid(self) -> int:
        """Waits until the engine process has started."""
        return self.children_of_kind(ENGINE, 1)[0]

    def children_of_kind(self, module: str, count: int) -> list[int]:
        """The ids of the processes that run `module`, oldest first; waits until there are so many."""
        return [p.pid for p in poll(lambda: self._find(module, count), f"{count} processes of {module}")]

    def _find(self, module: str, count: int) -> list[psutil.Process] | None:
        found = []
        for child in self.tree()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return sorted(found, key=lambda p: p.create_time()) if len(found) >= count else None

    def tree(self) -> list[psutil.Process]:
        """The HTTP process, then its descendants; those seen before are remembered, even when they are orphans."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self._self, *self._self.children(recursive=True)]:
                self._tree.setdefault(process.pid, process)
        return list(self._tree.values())

    @property
    def url(self) -> str:
        """Waits until it listens."""
        if self.uds:
            return "http://server"
        port = poll(self._listening_port, f"a listening port; stderr: {self.stderr}")
        return f"http://127.0.0.1:{port}"

    def _listening_port(self) -> int | None:
        try:
            connections = self._self.net_connections("tcp")
        except psutil.NoSuchProcess:
            raise AssertionError(f"the server ended: {self.stderr}") from None
        listening = [str(c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]
        return next((int(port) for port in listening if port not in self._command), None)  # not the admin routes'

    def client(self, **options: object) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        return httpx.Client(base_url=self.url, transport=transport, timeout=ANSWER_DEADLINE, **options)  # type: ignore[arg-type]

    def async_client(self, **options: object) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=self.uds) if self.uds else None
        return httpx.AsyncClient(base_url=self.url, transport=transport, timeout=ANSWER_DEADLINE, **options)  # type: ignore[arg-type]

    # What it does

    def wait_ready(self) -> None:
        with self._connected() as client:
            poll(lambda: self._health(client) == 200, "/health to say 200", START_DEADLINE)
        self.tree()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[httpx.Client]:
        if self.uds:
            poll(lambda: os.path.exists(self.uds or "") or not self.running, "the socket")
        with self.client() as client:
            yield client

    def _health(self, client: httpx.Client) -> int:
        assert self.running, f"the server ended: {self.stderr}"
        with contextlib.suppress(httpx.TransportError):
            return client.get("/health").status_code
        return 0

    def metrics(self) -> dict[str, float]:
        """Samples by name without prefix; with a label beside the model's name and the engine: `name:value`.

        Those of several engines are added up, and are there one by one too: `name@engine`.
        """
        with self.client() as client:
            text = client.get("/metrics").text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [v for name, v in sorted(sample.labels.items()) if name not in ("model_name", "engine")]
                name = ":".join([sample.name.removeprefix("xllm_npu:"), *labels])
                samples[name] = samples.get(name, 0) + sample.value
                if "engine" in sample.labels:
                    samples[f"{name}@{sample.labels['engine']}"] = sample.value
        return samples

    def wait_idle(self) -> None:
        """Until the engine has no request and no used KV block."""
        poll(lambda: not any(self.metrics()[name] for name in GAUGES), "an idle engine")

    def wait_running(self, count: int) -> None:
        """Until so many sequences are in the running batch."""
        poll(lambda: self.metrics()[GAUGES[0]] == count, f"{count} running requests")

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, deadline: float = DEADLINE) -> int:
        """Its exit code."""
        return self._process.wait(deadline)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.tree()
        self.send(number)
        return self.wait()

    def open_files(self) -> tuple[int, int]:
        """Open file descriptors of the HTTP process and of the engine process."""
        return self._self.num_fds(), psutil.Process(self.engine_pid).num_fds()

    # What it leaves

    def assert_nothing_left(self, deadline: float = 10.0) -> None:
        """Children end with their parent, if not before it: they get a moment."""
        poll(lambda: not self.survivors(), f"the end of {self.survivors()}", deadline)
        assert self.socket_directories() == []
        for alarm in self.alarms:
            assert alarm not in self.stderr, self.stderr

    def survivors(self) -> list[psutil.Process]:
        alive = []
        for process in self._tree.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def socket_directories(self) -> list[str]:
        return [path.name for path in self._tmp.glob("xllm-npu-*")]

    def _kill_tree(self) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
