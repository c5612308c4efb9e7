"""The scheduler over an elastic KV cache: the state machine of the ordinary one, where every block that a step touches
must have memory when the step runs, and memory that comes and goes while requests run.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule

from tests.scheduling.test_scheduler_states import SchedulerMachine
from tests.support.page_backend import ScriptedBackend
from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output
from xllm_npu.scheduling import scheduler as scheduler_module
from xllm_npu.state.kv_cache.elastic_block_pool import ElasticBlockPool
from xllm_npu.state.kv_cache.page_allocator import PINNED_PAGE, PageAllocator
from xllm_npu.state.kv_cache.page_layout import PageLayout
from xllm_npu.state.messages import FINISH_ERROR, sequence_key


def elastic(num_pages: int, most: int | None = None, page_bytes: int = 224, preallocate: bool = False):
    """(arguments of `Driver`, the backend): pages of three blocks of 64 bytes, some blocks between pages."""
    layout = PageLayout(page_bytes=page_bytes, block_bytes=64, num_pages=num_pages, num_regions=4)
    backend = ScriptedBackend(layout, most)
    pool = ElasticBlockPool(PageAllocator(layout, backend, preallocate=preallocate))
    return {"pool": pool, "is_mapped": backend.is_mapped}, backend


class ElasticSchedulerMachine(SchedulerMachine):
    def memory(self, num_blocks):
        arguments, self.backend = elastic(num_blocks // 2 + 2)
        return arguments

    @rule(most=st.integers(2, 30))
    def memory_changes(self, most):
        """Never less than one sequence needs: what is taken stays, but growth may be refused for a while."""
        self.backend.most = min(max(most, 8), self.backend.layout.num_pages)

    def teardown(self):
        if hasattr(self, "backend"):
            self.backend.most = self.backend.layout.num_pages
        super().teardown()
        if hasattr(self, "backend"):
            assert self.backend.mapped == {PINNED_PAGE}, "nothing runs, and memory is held"


TestElasticScheduler = ElasticSchedulerMachine.TestCase
TestElasticScheduler.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("overlap", "most", "preallocate"), [
    *itertools.product((False, True), (60, 14), (False, True))])
def test_tokens_do_not_depend_on_pages(overlap, most, preallocate):
    arguments, backend = elastic(60, most, preallocate=preallocate)
    driver = Driver(overlap, vocab=50_000, max_chunk=16, **arguments)
    prompts = [list(range(i, i + 3 + 7 * i)) for i in range(1, 9)]
    for i, prompt in enumerate(prompts):
        driver.scheduler.add(add_request(i, prompt, max_tokens=20))
    driver.run()
    for i, prompt in enumerate(prompts):
        assert driver.output(i) == expected_output(prompt, 20, 50_000), f"request {i}"
    if most == 14:
        assert driver.scheduler.stats.preemptions_total > 0
    arguments["pool"].pages.wait_settled()
    assert backend.mapped == {PINNED_PAGE}
    driver.scheduler.close()


def test_rule_39_admission_counts_what_memory_allows_now():
    arguments, backend = elastic(60, most=5)
    driver = Driver(**arguments)
    for i in range(2):
        driver.scheduler.add(add_request(i, list(range(i, i + 30)), max_tokens=2))
    group = driver.scheduler.schedule()
    assert group is not None
    assert group.batches[0].rows.size == 1, "two prompts of 8 blocks do not fit into 4 pages"
    assert len(driver.scheduler.waiting) == 1
    backend.most = 60
    group = driver.scheduler.schedule()
    assert group is not None
    assert len(driver.scheduler.waiting) == 0


def test_a_request_that_others_leave_no_memory_for_ends_with_an_error(monkeypatch):
    arguments, backend = elastic(60, most=2)
    driver = Driver(**arguments)
    scheduler = driver.scheduler
    scheduler.add(add_request(0, list(range(40)), max_tokens=2))
    assert scheduler.schedule() is None
    assert scheduler.stalled
    backend.most = 60
    assert scheduler.schedule() is not None, "memory came free in time"
    assert not scheduler.stalled
    driver = Driver(**elastic(60, most=2)[0])
    driver.scheduler.add(add_request(1, list(range(40)), max_tokens=2))
    monkeypatch.setattr(scheduler_module, "STALL_SECONDS", 0.0)
    assert driver.scheduler.schedule() is None
    assert driver.scheduler.schedule() is None
    ends = driver.scheduler.pending_outputs().finished
    assert [(end.key, end.reason) for end in ends] == [(sequence_key(1, 0), FINISH_ERROR)]
    assert not driver.scheduler.has_work
    driver.scheduler.check_integrity()
