"""A server that cannot start says why in one sentence that tells what to change, and is gone, children included."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server import FAST, START_DEADLINE, poll
from tests.support.short_paths import short_directory

pytestmark = pytest.mark.multiprocess

WRONG_USAGE, FAILED = 2, 1
USAGE = "xllm-npu: error: "
PROGRESS = ("Loading kernels", "Loading weights", "Warming up")


@dataclass
class Case:
    """`damage` is done to a copy of a good model; `says` must all be in the sentence."""

    name: str
    says: tuple[str, ...]
    flags: tuple[str, ...] = ()
    damage: Callable[[Path], object] = lambda directory: None
    code: int = FAILED
    begins: str = "xllm-npu: Cannot start: "


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def configure(**fields: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return damage


def no_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


CASES = [
    Case("missing directory", ("There is no directory",), damage=shutil.rmtree),
    Case("broken config", ("config.json",), damage=lambda d: (d / "config.json").write_text("{")),
    Case("no weights", ("safetensors",), damage=no_weights),
    Case("pickle", ("pytorch_model.bin", "safetensors"), damage=pickle_only),
    Case("truncated weights", ("model.safetensors",), damage=truncate),
    Case("wrong shape", ("model.layers.0.mlp", "shape"), damage=configure(intermediate_size=96)),
    Case("unknown architecture", ("FooForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"),
         damage=configure(architectures=["FooForCausalLM"], model_type="foo")),
    Case("no native network", ("GPT2LMHeadModel", "LlamaForCausalLM"), ("--model-impl", "native"),
         configure(architectures=["GPT2LMHeadModel"], model_type="gpt2")),
    Case("graphs through transformers", ("enable_graph", "--model_impl"),
         ("--model-impl", "transformers", "--enable-graph")),
    Case("devices through transformers", ("--tp_size 1", "--dp_size"),
         ("--model-impl", "transformers", "--tp-size", "2")),
    Case("no tokenizer", ("tokenizer.json", "Copy"), damage=no_tokenizer),
    Case("broken tokenizer", ("tokenizer.json",), damage=lambda d: (d / "tokenizer.json").write_text("{}")),
    Case("unknown flag", ("--max-model-length", "--max-model-len"), ("--max-model-length", "9"),
         code=WRONG_USAGE, begins=USAGE),
    Case("out of range", ("--max-memory-utilization", "1"), ("--max-memory-utilization", "3"),
         code=WRONG_USAGE, begins=USAGE),
    Case("length above the model's", ("max_model_len", "32768"), ("--max-model-len", "99999")),
    Case("no room for a block", ("max_cache_size",), ("--max-cache-size", "1KiB")),
    Case("no room for a sequence", ("max_cache_size", "max_model_len"),
         ("--max-cache-size", "1MiB", "--max-model-len", "32768")),
    Case("no such device", ("npu",), ("--platform", "npu")),
    Case("unknown attention", ("flash", "attention_backend", "torch"), ("--attention-backend", "flash")),
]


@dataclass
class Outcome:
    code: int
    stderr: list[str]  # without progress
    left: list[str]


def start(case: Case, model: Path, root: Path, port: int = 0) -> Outcome:
    directory, tmp = root / "model", short_directory()
    shutil.copytree(model, directory)
    case.damage(directory)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLLM_NPU_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "xllm_npu.cli", "serve", str(directory), "--port", str(port), *FAST, *case.flags],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**environment, "TMPDIR": str(tmp), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    try:
        _, stderr = process.communicate(timeout=START_DEADLINE)
        poll(lambda: not group_exists(process.pid), f"{case.name}: the end of its children")
    finally:
        if group_exists(process.pid):
            os.killpg(process.pid, 9)
    lines = [line for line in stderr.splitlines() if not line.startswith(PROGRESS)]
    return Outcome(process.returncode, lines, [path.name for path in tmp.glob("xllm-npu-*")])


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# Each is refused where another of the list is: in reading the checkpoint, or the settings.
SLOW_CASES = {"broken config", "pickle", "wrong shape", "no native network", "graphs through transformers",
              "devices through transformers", "broken tokenizer", "out of range", "no room for a block",
              "unknown attention", "missing directory", "no weights", "no room for a sequence", "no such device",
              "truncated weights"}


@pytest.fixture(scope="module")
def outcomes(request, tiny_dir: Path, tmp_path_factory) -> Iterator[dict[str, Future[Outcome]]]:
    """Of the cases that are tested in this run: all are started at once, as many at a time as there are cores for."""
    cases = [item.callspec.params["case"] for item in request.session.items
             if getattr(item, "originalname", "") == test_failure.__name__]
    with ThreadPoolExecutor(max(2, min(os.cpu_count() or 2, 8))) as pool:
        yield {case.name: pool.submit(start, case, tiny_dir, tmp_path_factory.mktemp("failure")) for case in cases}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name.replace(" ", "-"), marks=pytest.mark.slow if case.name in SLOW_CASES else ())
    for case in CASES])
def test_failure(outcomes, case):
    check(outcomes[case.name].result(), case)


def check(outcome: Outcome, case: Case) -> None:
    assert outcome.code == case.code, outcome.stderr
    assert outcome.left == []
    lines = [line for line in outcome.stderr if " W doctor: " not in line]  # what it found before it tried
    assert 1 <= len(lines) <= 2, outcome.stderr
    sentence = outcome.stderr[-1]
    assert sentence.startswith(case.begins)
    for part in case.says:
        assert part in sentence


def test_taken_port(tiny_dir, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        case = Case("port", (f"Port {port}", "--port"), begins="xllm-npu: ")
        check(start(case, tiny_dir, tmp_path, port), case)
