"""An engine loop in the test's own process: prompts in, greedy tokens out."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.state.messages import SEQUENCES_PER_REQUEST, AddRequest
from xllm_npu.state.sampling_params import SamplingParams


def run_engine(
    model: Path, prompts: list[list[int]], max_tokens: int, **settings
) -> tuple[list[list[int]], EngineLoop]:
    """(the tokens generated for each prompt, the closed loop for its statistics); all prompts at once."""
    options = {"dtype": "float32", "block_size": 16, "max_cache_size": "24MiB", "num_threads": 1, **settings}
    loop = EngineLoop.create(settings_from_kwargs(model=str(model), **options))
    try:
        for i, prompt in enumerate(prompts):
            loop.submit(AddRequest(
                request_id=i, external_id=str(i), prompt=np.array(prompt, np.int32).tobytes(),
                params=SamplingParams(temperature=0.0, max_tokens=max_tokens), arrival_time=time.time()))
        answers: list[list[int]] = [[] for _ in prompts]
        while loop.has_work():
            outputs = loop.step()
            if outputs is not None:
                for key, token in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
                    answers[key // SEQUENCES_PER_REQUEST].append(token)
                assert not [f for f in outputs.finished if f.message]
        loop.scheduler.check_integrity()
        assert loop.scheduler.running.blocks.pool.num_used == 0
    finally:
        loop.close()
    return answers, loop
