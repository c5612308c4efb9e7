"""Ten thousand steps of random traffic: nothing leaked, doubly owned or stale, and every block free at the end."""

import random

import pytest

from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output
from xllm_npu.state.messages import sequence_key


@pytest.mark.parametrize("policy", [
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("prefill_first", "decode_first")), "unified"])
def test_ten_thousand_steps(policy):
    rng = random.Random(policy)
    driver = Driver(True, policy=policy, max_seqs=12, max_tokens=48, num_blocks=48, max_chunk=16, vocab=97)
    scheduler, requests, aborted, steps = driver.scheduler, {}, set(), 0
    while steps < 10_000:
        if len(scheduler.requests) < 16 and rng.random() < 0.3:
            request_id = len(requests)
            prompt = [*range(rng.choice((0, 8, 24))), *(rng.randrange(97) for _ in range(rng.randint(1, 12)))]
            requests[request_id] = (prompt, rng.randint(1, 40), rng.choice((1, 1, 1, 3)))
            scheduler.add(add_request(request_id, prompt, max_tokens=requests[request_id][1], n=requests[request_id][2],
                                      priority=rng.randint(0, 3), offline=rng.random() < 0.3))
        if scheduler.requests and rng.random() < 0.02:
            request_id = rng.choice(sorted(scheduler.requests))
            keys = [sequence_key(request_id, i) for i in range(requests[request_id][2])]
            aborted.update(keys)
            scheduler.abort(keys)
        driver.step()
        steps = driver.worker.steps
        if steps % 50 == 0:
            scheduler.check_integrity()
    driver.run()
    assert scheduler.running.blocks.pool.num_used == 0
    assert scheduler.stats.preemptions_total > 0
    assert scheduler.stats.prefix_hits_total > 0
    for request_id, (prompt, count, n) in requests.items():
        for index in range(n):
            got = driver.output(request_id, index)
            wanted = expected_output(prompt, count, 97, index)
            assert got == (wanted[: len(got)] if sequence_key(request_id, index) in aborted else wanted)
