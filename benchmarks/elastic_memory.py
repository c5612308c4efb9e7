"""What memory that comes and goes costs: decode throughput over an elastic KV cache, and the time of sleep and wake-up.

Decode: one engine with a physical cache and one with an elastic one, in this process, answer the same requests in turns
of a few steps; what each has needed is compared, growth in mid-decode included. Sleep and wake-up: an engine with its
weights in virtual memory, levels 1 and 2, against copying as many bytes once on the device (the fastest of its runs).
What mapping and unmapping one page takes is page_mapping.py's.

    python benchmarks/elastic_memory.py [--json] [--model smollm2] [--sequences 16] [--tokens 192] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from xllm_platform.registry import select

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.engine_start import start_engine
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.state.messages import AddRequest
from xllm_npu.state.sampling_params import SamplingParams

TURN = 8  # steps of one engine in a row
ELASTIC = {"enable_vmm_kvcache": True, "vmm_elastic": True}
PROMPT = 32


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def submit(loop: EngineLoop, given: argparse.Namespace, round_number: int) -> None:
    """Prompts that no round had before, so that no cache knows them."""
    rng = np.random.default_rng(round_number)
    for i in range(given.sequences):
        prompt = rng.integers(10, 200, PROMPT).astype(np.int32)
        loop.submit(AddRequest(
            request_id=round_number * 1000 + i, external_id=str(i), prompt=prompt.tobytes(), arrival_time=time.time(),
            params=SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)))


def prefill(loop: EngineLoop, sequences: int) -> None:
    """Until every sequence has its first token."""
    seen: set[int] = set()
    while len(seen) < sequences:
        outputs = loop.step()
        if outputs is not None:
            seen.update(outputs.key_array().tolist())


def decode_round(loops: list[EngineLoop], given: argparse.Namespace, number: int) -> list[float]:
    """Seconds that each engine has decoded for, all of them the same tokens."""
    seconds = [0.0] * len(loops)
    for loop in loops:
        submit(loop, given, number)
        prefill(loop, given.sequences)
    turn = number % 2
    while any(loop.has_work() for loop in loops):
        loop = loops[turn % 2]

        def steps(loop: EngineLoop = loop) -> None:
            for _ in range(TURN):
                if loop.has_work():
                    loop.step()

        seconds[turn % 2] += timed(steps)
        turn += 1
    return seconds


def measure_decode(options: dict[str, Any], given: argparse.Namespace) -> dict[str, float]:
    loops = [EngineLoop.create(settings_from_kwargs(**options, **more)) for more in ({}, ELASTIC)]
    try:
        decode_round(loops, given, 0)  # warm
        found = [decode_round(loops, given, number) for number in range(1, given.rounds + 1)]
    finally:
        for loop in loops:
            loop.close()
    tokens = given.sequences * (given.tokens - 1)
    ratios = sorted(physical / elastic for physical, elastic in found)
    return {"physical, tokens/s": tokens / statistics.median(physical for physical, _ in found),
            "elastic, tokens/s": tokens / statistics.median(elastic for _, elastic in found),
            "elastic / physical, median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}


def measure_sleep(options: dict[str, Any], given: argparse.Namespace) -> dict[str, float]:
    """Milliseconds, and the bytes that sleep gave back."""
    engine, ready = start_engine(settings_from_kwargs(**options, **ELASTIC, enable_vmm_weights=True), None,
                                 lambda progress: None, overlap=False)
    found: dict[str, list[float]] = {}
    freed = 0
    try:
        for _ in range(given.rounds):
            for level in (1, 2):
                begin = time.perf_counter()
                freed = engine.sleep(level)
                slept = time.perf_counter()
                engine.wake()
                found.setdefault(f"sleep, level {level}", []).append(slept - begin)
                found.setdefault(f"wake-up, level {level}", []).append(time.perf_counter() - slept)
    finally:
        engine.close()
    source = torch.ones(freed, dtype=torch.uint8, device=select(ready.platform).device())
    target = torch.empty_like(source)
    copy = min(timed(lambda: target.copy_(source)[-1].item()) for _ in range(5))
    figures = {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    return {**figures, "copy of as many bytes": 1e3 * copy, "bytes given back": float(freed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="of the processor; 0: as serving chooses")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192, help="that each of them generates")
    parser.add_argument("--max-cache-size", default="1GiB")
    parser.add_argument("--page-bytes", default="256KiB", help="of a physical page: small ones are mapped more often")
    parser.add_argument("--block-size", type=int, default=16, help="tokens: small blocks need the next page sooner")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    options = {"model": given.model, "dtype": given.dtype, "num_threads": given.threads, "max_model_len": 1024,
               "max_cache_size": given.max_cache_size, "phy_page_granularity_size": given.page_bytes,
               "max_seqs_per_batch": max(given.sequences, 2), "enable_prefix_cache": False,
               "block_size": given.block_size}
    before = os.getloadavg()[0]
    decode, sleep = measure_decode(options, given), measure_sleep(options, given)
    print(f"{given.model}, torch {torch.__version__}, {given.sequences} sequences, {given.tokens} tokens each, "
          f"{given.rounds} rounds; load of the machine before: {before:.1f}")
    for name, value in decode.items():
        print(f"{name:28} {value:12,.3f}")
    for name, value in sleep.items():
        print(f"{name:28} {value:12,.0f} {'' if name.startswith('bytes') else 'ms'}")
    if given.json:
        print(json.dumps({**decode, **sleep}))


if __name__ == "__main__":
    main()
