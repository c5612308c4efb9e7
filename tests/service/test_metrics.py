import pytest
from prometheus_client.parser import text_string_to_metric_families

from xllm_npu.metrics import HISTOGRAMS, PREFIX, VLLM_PREFIX, Histogram, Metrics, render


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, label value, ...) without the model's name -> value, as a Prometheus server reads them."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels.get("model_name") == "m"
            found[sample.name, *(labels[name] for name in sorted(labels))] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.set_model("m", [{"block_size": 128, "num_kv_blocks": 7}, {"block_size": 128, "num_kv_blocks": 8}])
    return metrics


def test_engine_statistics(metrics):
    metrics.set_engine(0, running=1, steps_total=7)
    metrics.set_engine(1, running=3, waiting=2, kv_usage=0.5, preemptions_total=4, prefix_queries_total=100,
                       prefix_hits_total=60, steps_total=1, prompt_tokens_total=50, generation_tokens_total=70,
                       last_step_tokens=9, last_step_seconds=0.1, graph_misses_total=1, prefill_graph_misses_total=6)
    got = samples(metrics)
    for name, value in {"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.5,
                        "num_preemptions_total": 4, "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 60,
                        "prompt_tokens_total": 50, "generation_tokens_total": 70, "engine_steps_total": 1,
                        "graph_misses_total": 1, "prefill_graph_misses_total": 6}.items():
        assert got["xllm_npu:" + name, "1"] == value, name
    assert got["xllm_npu:num_requests_running", "0"] == 1
    assert got["xllm_npu:engine_steps_total", "0"] == 7
    assert got["xllm_npu:cache_config_info", "128", "0", "7"] == got["xllm_npu:cache_config_info", "128", "1", "8"] == 1


def test_a_step_is_counted_once(metrics):
    for step, tokens in ((1, 5), (1, 5), (2, 100), (3, 0)):
        metrics.set_engine(0, steps_total=step, last_step_tokens=tokens)
    metrics.set_engine(1, steps_total=3, last_step_tokens=7)
    metrics.set_engine(1, steps_total=3, last_step_tokens=7)
    got = samples(metrics)
    assert got["xllm_npu:iteration_tokens_total_count", "0"] + got["xllm_npu:iteration_tokens_total_count", "1"] == 3
    assert got["xllm_npu:iteration_tokens_total_sum", "0"] == 105


def test_a_finished_request(metrics):
    metrics.of_engine(1).on_first_token(0.2)
    metrics.of_engine(1).on_queued(0.1, 0.1)
    metrics.of_engine(1).on_tokens(4, 0.8)
    metrics.of_engine(1).on_finished("length", prompt_tokens=10, generation_tokens=5, n=1, max_tokens=5,
                                     e2e_seconds=1.0, first_token_seconds=0.2, queue_seconds=0.1)
    got = samples(metrics)
    assert got["xllm_npu:request_success_total", "1", "length"] == 1
    assert got["xllm_npu:request_success_total", "1", "stop"] == 0
    for name, count, total in (
            ("time_to_first_token_seconds", 1, 0.2), ("request_queue_time_seconds", 1, 0.1),
            ("inter_token_latency_seconds", 4, 0.8), ("request_time_per_output_token_seconds", 1, 0.2),
            ("e2e_request_latency_seconds", 1, 1.0), ("request_decode_time_seconds", 1, 0.8),
            ("request_inference_time_seconds", 1, 0.9), ("request_prompt_tokens", 1, 10),
            ("request_generation_tokens", 1, 5), ("request_params_n", 1, 1), ("request_params_max_tokens", 1, 5)):
        assert got[f"xllm_npu:{name}_count", "1"] == count, name
        assert got[f"xllm_npu:{name}_sum", "1"] == pytest.approx(total), name


def test_a_request_without_tokens(metrics):
    metrics.of_engine(1).on_finished("abort", prompt_tokens=10, generation_tokens=0, n=1, max_tokens=None,
                                     e2e_seconds=1.0)
    got = samples(metrics)
    assert got["xllm_npu:request_success_total", "1", "abort"] == 1
    assert got["xllm_npu:request_decode_time_seconds_count", "1"] == 0
    assert got["xllm_npu:request_params_max_tokens_count", "1"] == 0


def test_rejections(metrics):
    metrics.on_rejected("max_concurrent_requests")
    assert samples(metrics)["xllm_npu:admission_rejections_total", "max_concurrent_requests"] == 1


def test_buckets_are_cumulative_and_hold_their_bounds():
    histogram = Histogram((1.0, 2.0))
    for value, n in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.observe(value, n)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 4), ("+Inf", 7)]
    assert (histogram.count, histogram.sum) == (7, 31.0)


def test_bounds_rise():
    for name, _, bounds in HISTOGRAMS:
        assert list(bounds) == sorted(set(bounds)), name


def test_breakdowns(metrics):
    metrics.set_engine(0, waiting=3, prompt_tokens_total=50, prefix_hits_total=30)
    got = samples(metrics)
    assert got["xllm_npu:num_requests_waiting_by_reason", "0", "capacity"] == 3
    assert got["xllm_npu:prompt_tokens_by_source_total", "0", "local_compute"] == 50
    assert got["xllm_npu:prompt_tokens_by_source_total", "0", "local_cache_hit"] == 30
    assert got["xllm_npu:prompt_tokens_cached_total", "0"] == 30


def test_sleep_under_vllm_s_name(metrics):
    metrics.on_transition("sleep", 0.5, "")
    metrics.on_transition("wake", 0.25, "")
    metrics.on_transition("pause", 0.1, "")
    got = samples(metrics)
    assert got["xllm_npu:sleep_mode_operation_duration_seconds_sum", "sleep"] == 0.5
    assert got["xllm_npu:sleep_mode_operation_duration_seconds_sum", "wake_up"] == 0.25
    assert ("xllm_npu:sleep_mode_operation_duration_seconds_sum", "pause") not in got


def test_requests_count_on_when_engines_are_started_again(metrics):
    metrics.of_engine(1).on_first_token(0.1)
    metrics.on_restart()
    metrics.set_model("m", [{}, {}])
    metrics.of_engine(1).on_first_token(0.1)
    assert samples(metrics)["xllm_npu:time_to_first_token_seconds_count", "1"] == 2
    assert metrics.total("time_to_first_token_seconds") == (2, pytest.approx(0.2))


def test_the_same_under_vllm_s_prefix(metrics):
    metrics.of_engine(0).on_first_token(0.1)
    metrics.on_rejected("max_queued_requests")
    families = {f.name: f for f in text_string_to_metric_families(render([metrics], vllm_names=True).decode())}
    ours = {name for name in families if name.startswith(PREFIX)}
    assert {VLLM_PREFIX + name.removeprefix(PREFIX) for name in ours} == families.keys() - ours
    for name in ours:
        mine, same = families[name], families[VLLM_PREFIX + name.removeprefix(PREFIX)]
        assert (same.type, same.documentation) == (mine.type, mine.documentation)
        assert [(s.name.replace(VLLM_PREFIX, PREFIX), s.labels, s.value) for s in same.samples] == [
            (s.name, s.labels, s.value) for s in mine.samples]


# What vLLM 0.32 exposes, as its documentation names it, of features that this package has.
VLLM_NAMES = """num_requests_running num_requests_waiting num_requests_waiting_by_reason engine_sleep_state
    kv_cache_usage_perc prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_by_source
    prompt_tokens_cached generation_tokens request_success admission_rejections request_prompt_tokens
    request_generation_tokens request_params_n request_params_max_tokens iteration_tokens_total
    time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
    request_decode_time_seconds cache_config_info sleep_mode_operation_duration_seconds"""


def test_vllm_s_names(metrics):
    have = {f.name for f in text_string_to_metric_families(render([metrics], vllm_names=True).decode())}
    assert {VLLM_PREFIX + name for name in VLLM_NAMES.split()} - have == set()
