"""An `LLMMaster` with its engine processes, in the test's own event loop: what `service/` talks to, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.llm_master import EngineStatus, LLMMaster
from xllm_npu.master.request_factory import GenerationInput
from xllm_npu.state.output import RequestOutput
from xllm_npu.state.sampling_params import SamplingParams

FAST = {"dtype": "float32", "num_threads": 1, "max_cache_size": "20MiB", "block_size": 16, "max_seqs_per_batch": 64}
DEADLINE = 60.0


@contextlib.asynccontextmanager
async def running_master(model: Path, **settings) -> AsyncIterator[LLMMaster]:
    master = LLMMaster(settings_from_kwargs(model=str(model), **{**FAST, **settings}))
    await master.start()
    try:
        await until(lambda: master.status is not EngineStatus.LOADING, "the engines", 200.0)
        assert master.status is EngineStatus.READY, master.failure
        yield master
    finally:
        await master.shutdown(10.0)


async def until(question: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    """Poll until the answer is true; AssertionError that names `what` after `deadline` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline
    while not question():
        assert loop.time() < end, f"waited {deadline:g} s for {what}"
        await asyncio.sleep(0.01)


class Answer:
    """A request that is read as it comes."""

    def __init__(self, master: LLMMaster, prompt: list[int], max_tokens: int, salt: str = "", **params) -> None:
        """`salt`: prefixes are shared with requests of the same one."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str | None] = {}
        self.last: RequestOutput | None = None
        self._stream = master.generate(
            GenerationInput(prompt_token_ids=prompt, params=SamplingParams(**params), cache_salt=salt))
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self._stream:
            self.last = output
            for delta in output.deltas:
                self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
                self.reasons[delta.index] = delta.finish_reason

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))

    async def begun(self, count: int = 1) -> None:
        await until(lambda: self.count >= count, f"{count} tokens")

    async def whole(self) -> list[int]:
        """The tokens of its first sequence, when all have ended."""
        await asyncio.wait_for(self._task, DEADLINE)
        return self.tokens.get(0, [])

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stream.aclose()  # type: ignore[attr-defined]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Printable bytes."""
    return [32 + (i * 7 + seed * 13) % 90 for i in range(length)]


def metric(master: LLMMaster, name: str, **labels: str) -> float:
    """One sample of /metrics, without prefix and model name; the sum over engines unless `engine` says which."""
    ignored = {"model_name"} if "engine" in labels else {"model_name", "engine"}
    found = []
    for family in text_string_to_metric_families(master.metrics.render().decode()):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ignored}
            if (sample.name, own) == ("xllm_npu:" + name, labels):
                found.append(sample.value)
    assert found, f"no metric {name} with {labels}"
    return sum(found)
