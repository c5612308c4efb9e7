"""A fork on the emulated NPU, in a process of its own: the parent's pages by shareable handles, and captured graphs
over them; the same tokens, and no page of its own for weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from npu_emulator import fake_cann

from tests.npu_lab.test_serving import NEW_TOKENS, float32, model, prompts  # noqa: F401
from tests.support.sleeping import OPTIONS, answer, engine_of, resume, suspend
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.engine_start import local_init
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.memory.worker_memory import LocalWorkerMemory

pytestmark = [pytest.mark.npu_lab, pytest.mark.usefixtures("float32")]
VMM = {"platform": "npu", "enable_vmm_weights": True, "enable_vmm_kvcache": True, "vmm_elastic": True,
       "max_cache_size": "96MiB", "max_model_len": 1024, "max_seqs_per_batch": 256, "attention_backend": "npu",
       "enable_graph": True, "graph_batch_sizes": (1, 4)}
PAGE = 2**21  # which holds all weights of this model
# Says what it has and answers, again after a sleep, and after each line that it gets.
FORK = """
import json, sys
from pathlib import Path
import torch
from tests.npu_lab.test_fork import NEW_TOKENS, answer, engine_of, member, own_bytes, prompts, resume, suspend
with member(Path(sys.argv[1]), sys.argv[2], weights_from=sys.argv[3]) as loop:
    for turn in (0, 1):
        if turn:
            sys.stdin.readline()
            suspend(loop, 1)
            resume(loop)
        print(">" + json.dumps({"pages": own_bytes(loop), "hash": engine_of(loop).weights_hash(),
                                "tokens": answer(loop, prompts(), NEW_TOKENS)}), flush=True)
    sys.stdin.readline()
"""


@contextmanager
def member(model: Path, directory: str, **sockets: str) -> Iterator[EngineLoop]:  # noqa: F811
    """An engine of a family, which meets in `directory`."""
    settings = settings_from_kwargs(model=str(model), **{**OPTIONS, **VMM})
    init = local_init(settings, directory)
    for name, path in sockets.items():
        setattr(init, name, path)
    loop = EngineLoop.create(settings, None, init)
    try:
        yield loop
    finally:
        loop.close()


def own_bytes(loop: EngineLoop) -> int:
    """Of pages that this process made."""
    memory = engine_of(loop).memory
    assert memory is not None
    (worker,) = memory._workers
    assert isinstance(worker, LocalWorkerMemory)
    return worker._resources.committed_bytes


@pytest.mark.slow
def test_a_fork_has_the_parents_pages(model, tmp_path) -> None:  # noqa: F811
    directory, expected = model("llama")
    weights = str(tmp_path / "weights")
    before = fake_cann.counters().physical_bytes_live  # of other tests' models that nobody has collected yet
    with member(directory, str(tmp_path), weights=weights) as loop:
        child = subprocess.Popen(
            [sys.executable, "-c", FORK, str(directory), str(tmp_path), weights], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert child.stdin is not None
        assert child.stdout is not None

        def heard() -> dict:
            return json.loads(next(line for line in child.stdout or () if line.startswith(">"))[1:])

        first = heard()
        assert first["tokens"] == answer(loop, prompts(), NEW_TOKENS) == expected
        assert first["hash"] == engine_of(loop).weights_hash()
        assert own_bytes(loop) - first["pages"] == PAGE, "it has pages of its own for weights"
        suspend(loop, 1)  # the fork keeps what it has
        child.stdin.write("sleep, and wake up without the parent\n")
        child.stdin.flush()
        alone = heard()
        assert (alone["tokens"], alone["hash"]) == (expected, first["hash"])
        assert alone["pages"] - first["pages"] == PAGE
        resume(loop)
        assert answer(loop, prompts(), NEW_TOKENS) == expected
        child.stdin.close()
        assert child.wait(60) == 0
    assert fake_cann.counters().physical_bytes_live <= before
