"""Greedy tokens of a tiny checkpoint in float32 through the whole engine, against torch's operators on the CPU.

Scheduler, paged cache with shared prefixes, overlap, sampler and, where the device has them, graphs; then with chunked
prompts, without overlap, with a cache so small that sequences are preempted, and with one in virtual memory. Then an
engine that sleeps and wakes, at both levels, with the graphs it has.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import checkpoints
import own_tests  # noqa: F401
from part import Part
from xllm_models.backends import get_attention

from tests.support.engine import run_engine
from tests.support.sleeping import answer, engine_of, opened, resume, suspend

STEPS = 24
WAYS: dict[str, dict[str, Any]] = {
    "as served": {},
    "chunked prompts": {"max_tokens_per_batch": 48},
    "no overlap": {"enable_schedule_overlap": False},
    "preemption": {"max_cache_size": "400KiB"},
}
VIRTUAL: dict[str, dict[str, Any]] = {
    "virtual memory": {"enable_vmm_kvcache": True},
    "memory that grows": {"enable_vmm_kvcache": True, "vmm_elastic": True},
}
SLEEPY = {"enable_vmm_weights": True, "enable_vmm_kvcache": True, "max_cache_size": "96MiB", "max_model_len": 1024,
          "max_seqs_per_batch": 256}
SLEEP: dict[str, dict[str, Any]] = {"sleep, fixed": SLEEPY, "sleep, elastic": {**SLEEPY, "vmm_elastic": True}}


def sleep_and_wake(directory: Path, asked: list[list[int]], steps: int, expected: list[list[int]], **settings: Any
                   ) -> str:
    """What is wrong after a sleep, or nothing."""
    with opened(directory, **settings) as loop:
        wrong, before = checkpoints.difference(answer(loop, asked, steps), expected), engine_of(loop).weights_hash()
        for level in (1, 2):
            if not wrong and suspend(loop, level) <= 0:
                wrong = f"level {level} gave nothing back"
            if not wrong:
                resume(loop)
                same = engine_of(loop).weights_hash() == before
                wrong = checkpoints.difference(answer(loop, asked, steps), expected) if same else (
                    f"other weights after level {level}")
    return wrong


def main() -> None:
    part = Part()
    capabilities = part.platform().capabilities
    steps = 6 if part.dry_run else STEPS
    ways = WAYS | (VIRTUAL if capabilities.virtual_memory else {})
    asked = checkpoints.prompts(8)
    asked += [asked[0][:150] + [9, 8, 7], asked[0][:150] + [1, 2, 3]]  # prefixes that the cache knows
    with tempfile.TemporaryDirectory() as folder:
        directory = checkpoints.make(Path(folder), "llama")
        expected = checkpoints.reference(directory, asked, steps)
        for name in capabilities.attention_backends:
            backend = get_attention(name)
            for graph in (False, True):
                if graph and (capabilities.graph != "capture" or not backend.capture_safe):
                    continue  # a compiled graph is the CPU's, whose tests are elsewhere
                for way, settings in ways.items():
                    with part.check(f"{name}, {'graph' if graph else 'eager'}, {way}") as found:
                        part.need(5)
                        answers, _ = run_engine(directory, asked, steps, platform=part.platform_name,
                                                attention_backend=name, enable_graph=graph, **settings)
                        wrong = checkpoints.difference(answers, expected)
                        found |= {"ok": not wrong, "detail": wrong}
                for way, settings in SLEEP.items() if capabilities.virtual_memory else ():
                    with part.check(f"{name}, {'graph' if graph else 'eager'}, {way}") as found:
                        part.need(5)
                        wrong = sleep_and_wake(directory, asked, steps, expected, platform=part.platform_name,
                                               attention_backend=name, enable_graph=graph, **settings)
                        found |= {"ok": not wrong, "detail": wrong}


if __name__ == "__main__":
    main()
