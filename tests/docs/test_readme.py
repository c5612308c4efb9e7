"""The examples in both READMEs do what is shown below them, on the default model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block, blocks, examples
from tests.support.server import ServerProcess

READMES = ("README.md", "README.zh.md")
ADDRESS = "http://127.0.0.1:8000"
NEW_EACH_TIME = ("id", "created")


def test_both_have_the_same_code() -> None:
    english, chinese = ([(b.info, b.text) for b in blocks(name)] for name in READMES)
    assert english == chinese


def test_there_are_examples_of_every_kind() -> None:
    shown = [(run.language, output is not None) for run, output in examples("README.md")]
    assert shown == [("bash", True), ("python", True), ("python", True)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # The block size of `make serve`, which the shown number of cached tokens depends on.
    with ServerProcess("smollm2", tmp_path_factory.mktemp("readme"), "--block-size", "128",
                       "--max-cache-size", "64MiB") as started:  # fmt: skip
        yield started


@pytest.mark.model
@pytest.mark.multiprocess
@pytest.mark.parametrize(("run", "output"), [
    pytest.param(*example, id=name, marks=pytest.mark.slow if name == "offline" else ())
    for example, name in zip(examples("README.md"), ["curl", "openai", "offline"], strict=True)])
def test_example_prints_what_is_shown(run: Block, output: Block, server: ServerProcess, tmp_path: Path) -> None:
    printed = execute(run, server.url, tmp_path)
    if output.language == "json":
        assert _lasting(printed) == _lasting(output.text)
    else:
        assert printed == output.text


def execute(block: Block, url: str, directory: Path) -> str:
    assert ADDRESS in block.text or "LLM(" in block.text, "an example talks to the server or is one itself"
    text = block.text.replace(ADDRESS, url)
    command = {"bash": ["bash", "-euc", text], "python": [sys.executable, "-c", text]}[block.language]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XLLM_NPU_NUM_THREADS": "1",
                   "XLLM_NPU_MAX_CACHE_SIZE": "64MiB", "XLLM_NPU_MAX_MODEL_LEN": "512",
                   "PYTHONPATH": os.pathsep.join(str(ROOT / r) for r in (".", "platform", "models"))}  # fmt: skip
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def _lasting(text: str) -> dict[str, object]:
    reply: dict[str, object] = json.loads(text)
    for name in NEW_EACH_TIME:
        assert reply.pop(name)
    return reply
