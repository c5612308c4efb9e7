"""Memory that sleeps and wakes, and nothing else of an engine: asleep nothing is mapped, and all contents are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from xllm_npu.execution.engine_weights import LoadFailed
from xllm_npu.execution.weight_update import WeightsRefused
from xllm_npu.state.kv_cache.page_allocator import PageGrowthRefused
from xllm_npu.state.messages import KV_CACHE_TAG, TAGS


class SleepyMemory:
    """The `SleepingMemory` of an `EngineResidency`."""

    def __init__(self, lose_kv: Callable[[], object], check_rest: Callable[[], object] = lambda: None) -> None:
        """`lose_kv`: the KV cache's contents are gone. `check_rest` asserts what must hold when memory goes."""
        self._lose_kv, self._check_rest = lose_kv, check_rest
        self.awake = set(TAGS)
        self.level = 0
        self.calls: list[str] = []
        self.refuse_sleep: Exception | None = None
        self.refuse_wake = False
        self.refuse_check = self.refuse_load = ""
        self.checked: Future[None] | None = None  # of the test's, for checks that take their time

    @property
    def kv_is_mapped(self) -> bool:
        return KV_CACHE_TAG in self.awake

    def sleep(self, level: int) -> int:
        self.calls.append(f"sleep {level}")
        self._check_rest()
        if self.refuse_sleep is not None:
            raise self.refuse_sleep
        self.awake.clear()
        self._lose_kv()
        self.level = level
        return 1000

    def wake(self, tags: Iterable[str]) -> None:
        self.calls.append("wake " + " ".join(sorted(tags)))
        if self.refuse_wake:
            raise PageGrowthRefused("memory", "There is no memory, as the test says.")
        assert not self.awake & set(tags), "what is awake is woken up"
        self.awake |= set(tags)

    def check_weights(self, checkpoint: str) -> Future[None]:
        self.calls.append(f"check {checkpoint}")
        done: Future[None] = Future()
        if self.refuse_check:
            done.set_exception(WeightsRefused(self.refuse_check))
        elif self.checked is None:
            done.set_result(None)
        return done if self.checked is None else self.checked

    def load_weights(self, checkpoint: str) -> None:
        self.calls.append(f"load {checkpoint}")
        self._check_rest()
        if self.refuse_load:
            raise LoadFailed(self.refuse_load)
        self._lose_kv()
