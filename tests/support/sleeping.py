"""Engine loops that sleep and wake up in the test's own process, without a master around them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.engine import Engine
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.state.messages import SEQUENCES_PER_REQUEST, AddRequest
from xllm_npu.state.sampling_params import SamplingParams

WEIGHTS = {"enable_vmm_weights": True, "phy_page_granularity_size": 16384}
KINDS = {
    "elastic": {**WEIGHTS, "enable_vmm_kvcache": True, "vmm_elastic": True},
    "fixed": {**WEIGHTS, "enable_vmm_kvcache": True},
    "weights only": {**WEIGHTS, "vmm_elastic": True},
}
SMALL = {"max_model_len": 512, "max_seqs_per_batch": 8}
OPTIONS = {"dtype": "float32", "block_size": 16, "max_cache_size": "24MiB", "num_threads": 1,
           "enable_prefix_cache": False, **SMALL}


def prompts(count: int = 4) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(32, 120) for _ in range(rng.randrange(4, 100))] for _ in range(count)]


@contextmanager
def opened(model: Path, **settings) -> Iterator[EngineLoop]:
    loop = EngineLoop.create(settings_from_kwargs(model=str(model), **{**OPTIONS, **settings}))
    try:
        yield loop
    finally:
        loop.close()


def engine_of(loop: EngineLoop) -> Engine:
    return loop._engine


def answer(loop: EngineLoop, asked: list[list[int]], max_tokens: int = 40) -> list[list[int]]:
    for i, prompt in enumerate(asked):
        loop.submit(AddRequest(
            request_id=i, external_id=str(i), prompt=np.array(prompt, np.int32).tobytes(),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens), arrival_time=time.time()))
    answers: list[list[int]] = [[] for _ in asked]
    while loop.has_work():
        outputs = loop.step()
        assert outputs is not None
        for key, token in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
            answers[key // SEQUENCES_PER_REQUEST].append(token)
        assert not [f for f in outputs.finished if f.message]
    return answers


def suspend(loop: EngineLoop, level: int) -> int:
    """What an engine loop does around a sleep: the block pool is empty, and frozen."""
    if engine_of(loop).pages is not None:
        loop.scheduler.running.blocks.pool.pages.freeze()
    return engine_of(loop).sleep(level)


def resume(loop: EngineLoop, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
    engine_of(loop).wake(tags)
    if engine_of(loop).pages is not None and "kv_cache" in tags:
        loop.scheduler.running.blocks.pool.pages.thaw()
