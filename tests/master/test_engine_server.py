"""What an engine's server tells its parent beside a step's tokens."""

from __future__ import annotations

import numpy as np

from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.master.engine_process import EngineServer
from xllm_npu.scheduling.options import SchedulerOptions
from xllm_npu.scheduling.scheduler import Scheduler
from xllm_npu.state.kv_cache.page_allocator import PageStats
from xllm_npu.state.messages import KV_CACHE_TAG, OwnedPages, Shutdown, StepOutputs


class GrowingLoop(EngineLoop):
    """Every step has a token and takes a page."""

    def __init__(self, steps: int) -> None:
        self.scheduler = Scheduler(SchedulerOptions(
            max_seqs=1, max_tokens=8, max_model_len=8, num_blocks=4, block_size=4))
        self.mapped, self.steps = 1, steps
        self.scheduler.running.blocks.pool.page_stats = lambda: PageStats(mapped=self.mapped)
        self.residency = NoResidency()

    def _owned_pages(self):
        return [OwnedPages(owner=KV_CACHE_TAG, page_bytes=4096, mapped=self.mapped, slots=9)]

    def check(self):
        pass

    def has_work(self):
        return self.steps > 0

    def step(self):
        self.steps -= 1
        self.mapped += 1
        self.scheduler.update_gauges()
        return StepOutputs(keys=np.zeros(1, np.int64).tobytes(), tokens=np.zeros(1, np.int32).tobytes(),
                           stats=self.scheduler.stats)

    def close(self):
        pass


class NoResidency:
    def advance(self):
        return None


class Channel:
    def __init__(self, loop: GrowingLoop) -> None:
        self.loop = loop
        self.told: list[tuple[int, int]] = []  # pages mapped, as the allocator and as the ledger have them

    def receive(self, wait):
        return None if self.loop.has_work() else Shutdown()

    def send(self, message):
        self.told.append((message.stats.pages.mapped, message.stats.owned_pages[0].mapped))


def test_pages_of_the_ledger_are_told_with_the_step_that_took_them():
    loop = GrowingLoop(steps=3)
    channel = Channel(loop)
    EngineServer(channel, loop).run()
    assert channel.told == [(2, 2), (3, 3), (4, 4)]


class SilentLoop(GrowingLoop):
    """Pieces of one long prompt: steps that take a tenth of a second each and have no token."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.now = 0.0

    def step(self):
        self.steps -= 1
        self.now += 0.1
        self.scheduler.stats.prompt_tokens_total += 8
        return StepOutputs(stats=self.scheduler.stats)


class PromptTokens(Channel):
    def send(self, message):
        self.told.append(message.stats.prompt_tokens_total)


def test_steps_without_tokens_are_told_now_and_then(monkeypatch):
    loop = SilentLoop(steps=10)
    monkeypatch.setattr("xllm_npu.master.engine_process.time.monotonic", lambda: loop.now)
    channel = PromptTokens(loop)
    EngineServer(channel, loop).run()
    assert channel.told == [24, 48, 72]
