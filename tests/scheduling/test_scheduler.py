"""The scheduler's rules, one by one, over a scripted worker that checks every KV read."""

import itertools

import pytest

from tests.support.scheduler_driver import Driver, add_request
from tests.support.scripted_worker import expected_output, next_token, prefix_hash
from xllm_npu.state.messages import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, sequence_key

POLICIES = ("prefill_first", "decode_first", "unified")
PROMPTS = [list(range(i, i + 3 + 7 * i)) for i in range(1, 9)] + [list(range(1, 40)) + [i] for i in range(4)]


@pytest.mark.parametrize(
    ("policy", "prefix", "chunked", "overlap", "num_blocks"),
    list(itertools.product(POLICIES, (True, False), (True, False), (True, False), (120, 24))),
)
def test_tokens_do_not_depend_on_scheduling(policy, prefix, chunked, overlap, num_blocks):
    driver = Driver(overlap, policy=policy, enable_prefix_cache=prefix, enable_chunked_prefill=chunked,
                    max_chunk=16 if chunked else 0, num_blocks=num_blocks, vocab=50_000)
    for i, prompt in enumerate(PROMPTS):
        driver.scheduler.add(add_request(i, prompt, max_tokens=20))
    driver.run()
    for i, prompt in enumerate(PROMPTS):
        assert driver.output(i) == expected_output(prompt, 20, 50_000), f"request {i}"
        assert driver.finished[sequence_key(i, 0)].reason == FINISH_LENGTH
    assert driver.largest_step <= driver.options.max_tokens
    if num_blocks == 24:
        assert driver.scheduler.stats.preemptions_total > 0
    if prefix and policy != "prefill_first":
        assert driver.scheduler.stats.prefix_hits_total > 0


@pytest.mark.parametrize(("overlap", "every", "num_blocks"), list(itertools.product((True, False), (1, 3), (120, 24))))
def test_prefixes_that_are_forgotten_while_requests_run_change_no_token(overlap, every, num_blocks):
    driver = Driver(overlap, policy="decode_first", enable_prefix_cache=True, num_blocks=num_blocks, vocab=50_000)
    for i, prompt in enumerate(PROMPTS + PROMPTS):
        driver.scheduler.add(add_request(i, prompt, max_tokens=20))
    for turn in itertools.count():
        if not driver.step():
            break
        if turn % every == 0:
            driver.scheduler.reset_prefix_cache()
        driver.scheduler.check_integrity()
    for i, prompt in enumerate(PROMPTS + PROMPTS):
        assert driver.output(i) == expected_output(prompt, 20, 50_000), f"request {i}"
    hits = driver.scheduler.stats.prefix_hits_total
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.add(add_request(99, PROMPTS[-1], max_tokens=2))
    driver.run()
    assert driver.scheduler.stats.prefix_hits_total == hits


SWITCH = 24


def output_with_two_rotations(prompt, count, vocab):
    """Every token from keys that all belong to the rotation of the sequence's length at that time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(prefix_hash(tokens, len(tokens) > SWITCH), vocab, 0))
    return tokens[len(prompt):]


@pytest.mark.parametrize(
    ("policy", "prefix", "chunked", "overlap", "prompts"),
    list(itertools.product(POLICIES, (True, False), (True, False), (True, False), (
        PROMPTS, [PROMPTS[0]], [list(range(n)) for n in range(SWITCH - 3, SWITCH + 3)]))),
)
def test_sequences_that_outgrow_their_rotation_are_computed_anew(policy, prefix, chunked, overlap, prompts):
    """Alone, where nothing else can be scheduled meanwhile; and beside others with the same beginning."""
    driver = Driver(overlap, policy=policy, enable_prefix_cache=prefix, enable_chunked_prefill=chunked,
                    max_chunk=16 if chunked else 0, num_blocks=120, vocab=50_000, rotary_switch=SWITCH)
    for i, prompt in enumerate(prompts):
        driver.scheduler.add(add_request(i, prompt, max_tokens=20))
    driver.run()
    for i, prompt in enumerate(prompts):
        assert driver.output(i) == output_with_two_rotations(prompt, 20, 50_000), f"request {i}"
    outgrown = sum(len(prompt) <= SWITCH < len(prompt) + 19 for prompt in prompts)
    assert driver.scheduler.stats.preemptions_total == outgrown


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_forks_share_the_prompt_and_copy_on_write(overlap, length):
    driver = Driver(overlap, vocab=50_000)
    prompt = list(range(length))
    driver.scheduler.add(add_request(1, prompt, n=4, max_tokens=9))
    driver.run()
    for index in range(4):
        assert driver.output(1, index) == expected_output(prompt, 9, 50_000, salt=index)
    assert driver.scheduler.stats.prompt_tokens_total == length, "the prompt was computed more than once"


@pytest.mark.parametrize("overlap", [False, True])
def test_forks_without_rows_wait_and_still_finish(overlap):
    driver = Driver(overlap, vocab=50_000, max_seqs=3)
    driver.scheduler.add(add_request(1, range(9), n=6, max_tokens=5))
    driver.run()
    assert [driver.output(1, i) for i in range(6)] == [expected_output(range(9), 5, 50_000, i) for i in range(6)]


def test_forks_survive_a_small_cache():
    driver = Driver(True, vocab=50_000, num_blocks=14)
    driver.scheduler.add(add_request(1, range(10), n=5, max_tokens=30))
    driver.run()
    assert [driver.output(1, i) for i in range(5)] == [expected_output(range(10), 30, 50_000, i) for i in range(5)]
    assert driver.scheduler.stats.preemptions_total > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("many", [0, 20])
def test_stop_tokens_end_a_sequence_at_once(overlap, many):
    wanted = expected_output(range(5), 12, 50_000)
    driver = Driver(overlap, vocab=50_000)
    stops = (*range(60_000, 60_000 + many), wanted[6])
    driver.scheduler.add(add_request(1, range(5), max_tokens=12, stop_token_ids=stops))
    driver.run()
    assert driver.output(1) == wanted[:7]
    end = driver.finished[sequence_key(1, 0)]
    assert (end.reason, end.stop_token_id) == (FINISH_STOP, wanted[6])


@pytest.mark.parametrize("ignore", [False, True])
def test_eos_ends_unless_ignored(ignore):
    wanted = expected_output(range(5), 12, 50_000)
    driver = Driver(vocab=50_000, eos_token_ids=(wanted[3],))
    driver.scheduler.add(add_request(1, range(5), max_tokens=12, ignore_eos=ignore))
    driver.run()
    assert driver.output(1) == (wanted if ignore else wanted[:4])


def test_same_prompts_share_within_the_first_step():
    driver = Driver(max_tokens=256)
    for i in range(4):
        driver.scheduler.add(add_request(i, [*range(32), 100 + i], max_tokens=2))
    driver.step()
    assert driver.scheduler.stats.prompt_tokens_total == 33 + 3
    driver.run()


def test_without_in_batch_sharing_only_finished_prefills_are_shared():
    driver = Driver(max_tokens=256, enable_in_batch_prefix_cache=False)
    for i in range(2):
        driver.scheduler.add(add_request(i, [*range(32), 100 + i], max_tokens=2))
    driver.step()
    assert driver.scheduler.stats.prompt_tokens_total == 66
    driver.scheduler.add(add_request(5, [*range(32), 105], max_tokens=2))
    driver.run()
    assert driver.scheduler.stats.prefix_hits_total == 32


def test_salt_keeps_prompts_apart():
    driver = Driver()
    driver.scheduler.add(add_request(1, range(33), max_tokens=1, cache_salt="a"))
    driver.run()
    driver.scheduler.add(add_request(2, range(33), max_tokens=1, cache_salt="b"))
    driver.scheduler.add(add_request(3, range(33), max_tokens=1, cache_salt="a"))
    driver.run()
    assert driver.scheduler.stats.prefix_hits_total == 32


def test_generated_tokens_are_found_by_the_next_turn():
    driver = Driver(vocab=50_000)
    driver.scheduler.add(add_request(1, range(10), max_tokens=15))
    driver.run()
    turn = [*range(10), *driver.output(1), 5, 6]
    driver.scheduler.add(add_request(2, turn, max_tokens=3))
    driver.run()
    assert driver.scheduler.stats.prefix_hits_total == 24
    assert driver.output(2) == expected_output(turn, 3, 50_000)


def test_prefill_first_never_mixes_and_decode_first_does():
    def kinds(policy):
        driver = Driver(policy=policy, max_chunk=8)
        driver.scheduler.add(add_request(1, range(8), max_tokens=30))
        driver.step()
        driver.scheduler.add(add_request(2, range(50, 70), max_tokens=4))
        seen = []
        for _ in range(3):
            batch = driver.scheduler.schedule().batches[0]
            seen.append((batch.num_decodes, batch.rows.size - batch.num_decodes))
            from xllm_npu.execution.step_message import build_step_input
            message = build_step_input(batch, driver.scheduler.running.table, 4)
            driver.hear(driver.scheduler.process(driver.worker.execute(message)))
        driver.run()
        return seen

    assert kinds("prefill_first") == [(0, 1), (0, 1), (0, 1)]
    assert kinds("decode_first")[0] == (1, 1)


def test_requests_that_never_fit_are_refused():
    driver = Driver(num_blocks=5)
    driver.scheduler.add(add_request(1, range(10), max_tokens=20))
    driver.scheduler.add(add_request(2, range(200), max_tokens=1))
    driver.scheduler.add(add_request(3, [], max_tokens=1))
    driver.scheduler.add(add_request(4, range(5), max_tokens=3))
    driver.run()
    for i in (1, 2, 3):
        assert driver.finished[sequence_key(i, 0)].reason == FINISH_ERROR
    assert "8 KV cache blocks; the cache has 4 blocks" in driver.finished[sequence_key(1, 0)].message
    assert len(driver.output(4)) == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_frees_within_a_step(overlap):
    driver = Driver(overlap)
    for i in range(5):
        driver.scheduler.add(add_request(i, range(20 + i), max_tokens=50))
    for _ in range(6):
        driver.step()
    driver.abort([sequence_key(i, 0) for i in range(5)] + [sequence_key(77, 0)])
    assert not driver.scheduler.requests
    driver.run(5)
    assert driver.scheduler.running.blocks.pool.num_used == 0


def test_aborting_the_lead_before_its_fork_keeps_the_siblings():
    driver = Driver(policy="prefill_first", max_chunk=4, vocab=50_000)
    driver.scheduler.add(add_request(1, range(20), n=3, max_tokens=4))
    driver.step()
    driver.abort([sequence_key(1, 0)])
    driver.run()
    assert driver.output(1, 0) == []
    assert [driver.output(1, i) for i in (1, 2)] == [expected_output(range(20), 4, 50_000, i) for i in (1, 2)]


def test_a_sequence_aborted_after_it_gave_way_in_mid_step_gets_no_token_of_that_step():
    driver = Driver(overlap=True, policy="prefill_first", max_seqs=2, vocab=50_000)
    driver.scheduler.add(add_request(1, range(9), n=2, max_tokens=1, offline=True))
    driver.step()
    driver.scheduler.add(add_request(9, range(30, 39), max_tokens=1))
    assert driver.scheduler.schedule() is None
    assert driver.scheduler.stats.preemptions_total == 1
    driver.abort([sequence_key(1, 1)])
    driver.run()
    assert driver.output(1, 1) == []
    assert driver.output(1, 0) == expected_output(range(9), 1, 50_000)


def order_of_first_tokens(driver, count):
    order = []
    while len(order) < count:
        driver.step()
        order += [k // 256 for k in driver.tokens if k // 256 not in order]
    driver.run()
    return order


def test_priority_and_online_before_offline():
    driver = Driver(max_seqs=1, priority_strategy="priority", enable_starve_prevent=False)
    for i, (priority, offline) in enumerate([(0, True), (5, False), (1, False), (3, False)]):
        driver.scheduler.add(add_request(i, range(5), max_tokens=2, priority=priority, offline=offline))
    assert order_of_first_tokens(driver, 4) == [2, 3, 1, 0]


def test_shortest_job_first_and_the_starvation_guard():
    for guard, first in ((False, 1), (True, 0)):
        driver = Driver(max_seqs=1, priority_strategy="sjf", enable_starve_prevent=guard, starve_seconds=-1.0)
        driver.scheduler.add(add_request(0, range(30), max_tokens=2))
        driver.scheduler.add(add_request(1, range(5), max_tokens=2))
        assert order_of_first_tokens(driver, 2)[0] == first


def test_online_work_preempts_offline_work():
    driver = Driver(max_seqs=2, vocab=50_000)
    for i in range(2):
        driver.scheduler.add(add_request(i, range(9 + i), max_tokens=30, offline=True))
    driver.step()
    driver.scheduler.add(add_request(9, range(30, 39), max_tokens=3))
    driver.step()
    driver.step()
    assert driver.output(9), "the online request did not get a row at once"
    driver.run()
    assert driver.output(1) == expected_output(range(10), 30, 50_000)


def test_latency_budget_bounds_a_prefill_chunk():
    driver = Driver(latency_aware=True, max_ttft_seconds=0.010, max_tokens=512, max_model_len=512, num_blocks=200)
    model = driver.scheduler._latency
    for tokens in range(1, 33):
        model.observe(model.features(tokens, 0, 0, 0), 1e-3 * tokens)
    assert model.predict(model.features(8, 0, 0, 0)) == pytest.approx(8e-3, rel=0.05)
    driver.scheduler.add(add_request(1, range(100), max_tokens=1))
    batch = driver.scheduler.schedule().batches[0]
    assert 8 <= batch.num_tokens <= 10


def test_a_stop_token_beyond_the_tables_columns_wins_over_the_length_too():
    token = expected_output(range(5), 1, 50_000)[0]
    driver = Driver(vocab=50_000)
    driver.scheduler.add(add_request(1, range(5), max_tokens=1, stop_token_ids=(*range(60_000, 60_009), token)))
    driver.run()
    end = driver.finished[sequence_key(1, 0)]
    assert (end.reason, end.stop_token_id) == (FINISH_STOP, token)
